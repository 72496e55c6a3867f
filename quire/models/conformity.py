"""What a model's class has to keep to, looked at when a checkpoint is loaded and not when a request comes.

Each error names the class, the module in it and the way out (docs/adding-a-model.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import Linear
from quire.models.base import CausalLM
from quire.models.vision.base import VisionLanguageModel
from quire.types import KVSpec, MediaKind

_GUIDE = "see docs/adding-a-model.md"
# torch's and transformers' modules that do nothing to a row, or to each number alone and exactly.
_HARMLESS = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.Flatten,
    nn.Sequential,
)  # fmt: skip
# The way out for the others, by a part of the class's name.
_INSTEAD = (
    ("Linear", "Linear"), ("Conv1D", "Linear"), ("Embedding", "Embedding"), ("LayerNorm", "LayerNorm"),
    ("RMSNorm", "RMSNorm"),
)  # fmt: skip
_MOST_LISTED = 5
_OF_KINDS: Mapping[MediaKind, tuple[str, str]] = {
    "image": ("image_layout", "encode"), "video": ("video_layout", "encode_video"),
    "audio": ("audio_layout", "encode_audio"),
}  # fmt: skip


def check_class(model_class: type[CausalLM]) -> None:
    """Refuse a class that lacks a method. Raises UnsupportedModelError."""
    wanted: list[tuple[type, str]] = [(CausalLM, "embed"), (CausalLM, "forward")]
    if issubclass(model_class, VisionLanguageModel):
        methods = [name for kind in model_class.token_id_fields for name in _OF_KINDS[kind]]
        wanted = [(VisionLanguageModel, name) for name in methods]
        wanted += [(VisionLanguageModel, "rotary_positions")] if model_class.mrope else []
    for base, name in wanted:
        if getattr(model_class, name) is getattr(base, name):
            raise UnsupportedModelError(f"{_named(model_class)} has no method `{name}`: define it, {_GUIDE}.")


def _check_tables(model: CausalLM) -> None:
    """A lone text where several should stand would be read letter by letter, and match nothing."""
    renames, patterns = model.checkpoint_renames, [r"(.+)\.masked_bias"]
    forms: dict[str, tuple[bool, object]] = {
        "checkpoint_renames": (
            isinstance(renames, (list, tuple)) and all(_texts(pair) and len(pair) == 2 for pair in renames),
            [(r"old\.(.+)", r"new.\1")],
        ),
        "checkpoint_ignored": (_texts(model.checkpoint_ignored), patterns),
        "checkpoint_transposed": (_texts(model.checkpoint_transposed), patterns),
        "tied_weights": (isinstance(model.tied_weights, Mapping), {"lm_head.weight": "model.embed_tokens.weight"}),
    }
    for table, (good, form) in forms.items():
        if not good:
            raise UnsupportedModelError(
                f"{_named(type(model))} has {table} = {getattr(model, table)!r:.100}: it should look like {form!r}, "
                f"{_GUIDE}."
            )
    for pattern in (*(old for old, _ in renames), *model.checkpoint_ignored, *model.checkpoint_transposed):
        try:
            re.compile(pattern)
        except re.error as error:
            raise UnsupportedModelError(
                f"{_named(type(model))}: {pattern!r} in its tables is no regular expression: {error}; {_GUIDE}."
            ) from None


def _texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def check_model(model: CausalLM) -> None:
    """Refuse a model, just built, that lacks an attribute, that has tables which the loader cannot read, or torch's own
    layers in the text model's part.

    Raises UnsupportedModelError.
    """
    _check_tables(model)
    kinds: dict[str, tuple[Any, str]] = {
        "kv_spec": (KVSpec, "quire.types.KVSpec(layers, key/value heads, head_dim)"),
        "max_model_len": (int, "the number of positions that it has"),
    }
    if isinstance(model, VisionLanguageModel):
        kinds["language_model"] = (CausalLM, "by `adopt(text_model(config))`")
    elif type(model).logits is CausalLM.logits or type(model).vocab_size is CausalLM.vocab_size:
        kinds["lm_head"] = (Linear, "quire.layers.Linear(hidden size, vocabulary, bias=False)")
    for name, (kind, how) in kinds.items():
        value = getattr(model, name, None)
        if not isinstance(value, kind):
            what = "sets no" if value is None else f"has a {type(value).__name__} for"
            raise UnsupportedModelError(
                f"{_named(type(model))} {what} `{name}`: set it in __init__, as {how}; {_GUIDE}."
            )
    foreign = [(name, module) for name, module in model.named_modules() if _is_foreign(model, name, module)]
    if foreign:
        shown = [f"{name} is {_named(type(module))}{_instead(module)}" for name, module in foreign[:_MOST_LISTED]]
        more = f", and {len(foreign) - _MOST_LISTED} more" if len(foreign) > _MOST_LISTED else ""
        raise UnsupportedModelError(
            f"{_named(type(model))}: {'; '.join(shown)}{more}. What these make of a row depends on what else is in the "
            f"batch, and no LoRA adapter can change them: build the text model of quire's layers, {_GUIDE}."
        )


def _is_foreign(model: CausalLM, name: str, module: nn.Module) -> bool:
    """Whether it computes something by torch's or transformers' own code. A vision tower may."""
    forward = type(module).forward
    if isinstance(module, _HARMLESS) or model.is_visual(name) or model.computes_itself(name):
        return False
    if forward is nn.Module.forward:
        return False
    return forward.__module__.partition(".")[0] in ("torch", "transformers")


def _instead(module: nn.Module) -> str:
    kind = type(module).__name__
    for part, own in _INSTEAD:
        if part in kind:
            return f" (use quire.layers.{own})"
    if type(module).__module__.endswith("activation") or "activations" in type(module).__module__:
        return " (use quire.layers.activation)"
    return ""


def check_buffers(model: CausalLM) -> None:
    """Refuse a buffer that has no numbers, and that no file brings. Raises UnsupportedModelError."""
    for name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and leaf in module._non_persistent_buffers_set:
                raise UnsupportedModelError(
                    f"{_named(type(model))}: the buffer {f'{name}.{leaf}'.lstrip('.')} has no numbers, since models "
                    "are built on the meta device. Make it under `with torch.device('cpu')`, or let the checkpoint "
                    "bring it (persistent=True)."
                )


def check_size(file: Path, model: CausalLM) -> None:
    """What follows from several fields together must hold at least one token, head and layer."""
    spec = model.kv_spec
    sizes = {
        "layers": spec.num_layers,
        "key/value heads": spec.num_kv_heads,
        "dimensions of a head": spec.head_dim,
        "positions": model.max_model_len,
    }
    for what, size in sizes.items():
        if size < 1:
            raise UnsupportedModelError(f"{file}: the model that it describes has {size} {what}; it needs at least 1.")


def filled_by_files(model: CausalLM) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by name: what a checkpoint has tensors for."""
    filled: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                filled[f"{name}.{leaf}".lstrip(".")] = buffer
    return filled


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
