"""The families whose layers have states (Mamba-2), in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.gguf.file import GgufFile
from quire.errors import CheckpointError, UnsupportedModelError


def granite_hybrid(file: GgufFile) -> Mapping[str, Any]:
    """Granite 4, but for its multipliers. Layers without heads of keys have a state; positions are turned where the
    file says that rotations were trained."""
    layers, keys = file.layers, file.get("attention.head_count_kv")
    if not isinstance(keys, list) or len(keys) < layers:
        raise CheckpointError(
            f"{file.name}: granitehybrid.attention.head_count_kv must say, for each of the {layers} layers, how many "
            "heads of keys it has: by that, layers with attention are told from those with states."
        )
    turns = file.flag("rope.scaling.finetuned", True)
    if turns and file.number("rope.dimension_count", file.head_dim) != file.head_dim:
        raise UnsupportedModelError(f"{file.name}: turns a part of each head, as Bamba does, which is not served.")
    experts = file.number("expert_count", 0, least=0)
    shared = "ffn_gate_shexp.weight" if experts else "ffn_gate.weight"
    return {
        **_state(file),
        "num_key_value_heads": file.heads[1],
        "layer_types": ["full_attention" if one else "linear_attention" for one in keys[:layers]],
        "position_embedding_type": "rope" if turns else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": file.number("expert_used_count") if experts else 0,
        "shared_intermediate_size": file.rows(shared),
        "attention_bias": _has(file, "attn_q.bias"),
    }


def falcon_h1(file: GgufFile) -> Mapping[str, Any]:
    """What numbers are multiplied by is in the weights already, and so is 1 here: but for the output's, where that is
    the embeddings."""
    if "output.weight" not in file.tensors:
        raise UnsupportedModelError(
            f"{file.name}: a falcon-h1 whose output is its embeddings: by how much that is multiplied, no key says."
        )
    numbers = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **_state(file),
        **{f"{name}_multiplier": 1.0 for name in numbers},
        "head_dim": file.head_dim,
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": file.number("ssm.inner_size"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has(file, "ssm_out.bias"),
    }


def _state(file: GgufFile) -> dict[str, Any]:
    inner, heads = file.number("ssm.inner_size"), file.number("ssm.time_step_rank")
    if inner % heads:
        raise CheckpointError(f"{file.name}: {file.architecture}.ssm.inner_size is no multiple of its {heads} heads.")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": file.number("ssm.state_size"),
        "mamba_n_groups": file.number("ssm.group_count"),
        "mamba_d_conv": file.number("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // file.number("embedding_length")),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def _has(file: GgufFile, part: str) -> bool:
    """In any layer."""
    return any(name.endswith(f".{part}") for name in file.tensors)
