"""config.json's whole numbers, against what the checkpoint's files can hold, before anything is built of them.

A damaged or malicious number would otherwise build layers for minutes, or end in an error that names nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint.files import Checkpoint
from quire.errors import CheckpointError

# Of things of which each has a tensor of its own.
_PARTS = frozenset({
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "num_blocks", "num_decoder_layers",
    "num_encoder_layers", "decoder_layers", "encoder_layers", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts", "n_shared_experts", "num_nextn_predict_layers",
})  # fmt: skip
# Of things that lie along a side of a tensor.
_SIDES = frozenset({
    "hidden_size", "n_embd", "d_model", "embed_dim", "intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim",
    "head_dim", "num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads", "num_kv_heads",
    "kv_channels", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank",
    "num_labels", "mamba_d_state", "mamba_d_head", "mamba_n_heads", "mamba_n_groups", "mamba_d_ssm",
})  # fmt: skip
# So many are built in no time, whatever the files hold; what does not fit is then refused tensor by tensor.
_FEW_PARTS = 256
_FEW_SIDES = 1 << 16
_MOST = 2**63 - 1
_MOST_ID = 2**31 - 1
_ID_ENDINGS = ("_token_id", "_token_ids", "_token_index")


def check_numbers(raw: Mapping[str, Any], checkpoint: Checkpoint, file: Path) -> None:
    """Raise CheckpointError for a whole number in config.json, at any depth, that these files cannot have."""
    check_token_ids(raw, file)
    shapes = checkpoint.shapes()
    parts = max(len(shapes), _FEW_PARTS)
    side = max((size for shape in shapes.values() for size in shape), default=0)
    for field, value in _fields(raw):
        name = field.rpartition(".")[2]
        if type(value) is not int:
            continue
        if name in _PARTS and value > parts:
            raise CheckpointError(
                f"{file}: {field}={value}: its files hold {len(shapes):,} tensors, and each layer or expert has one at "
                "least."
            )
        if name in _SIDES and value > max(side, _FEW_SIDES):
            raise CheckpointError(f"{file}: {field}={value}: the longest side of its files' tensors is {side:,}.")
        if not -_MOST <= value <= _MOST:
            raise CheckpointError(f"{file}: {field} has {len(str(value))} digits, and at most {_MOST} is taken.")


def check_token_ids(raw: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError for what can be no token's id, at any depth. -1 and null stand for none."""
    for field, value in _fields(raw):
        if not field.endswith(_ID_ENDINGS) or value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(one) is int and -1 <= one <= _MOST_ID for one in ids):
            shown = repr(value)
            raise CheckpointError(
                f"{file}: {field}={shown if len(shown) <= 80 else shown[:77] + '...'}: it must be a token id, from 0 "
                f"to {_MOST_ID}, or a list of them."
            )


def _fields(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field with its value, those of objects in it by "outer.inner"."""
    waiting: list[tuple[str, Any]] = [("", raw)]
    while waiting:
        prefix, values = waiting.pop()
        for name, value in values.items():
            yield prefix + name, value
            if isinstance(value, dict):
                waiting.append((f"{prefix}{name}.", value))
