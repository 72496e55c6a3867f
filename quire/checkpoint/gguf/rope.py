"""What a GGUF file says of rotary positions, as transformers' fields."""

from __future__ import annotations

import math
from typing import Any

from quire.checkpoint.gguf.file import GgufFile
from quire.errors import UnsupportedModelError

_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# What the published models with "llama3" have; a file keeps what follows of it, for each frequency.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CLOSE = 1e-5


def rotation(file: GgufFile, turns_partly: bool) -> dict[str, Any]:
    """rope_theta, rope_scaling and, of families that turn a part of a head, partial_rotary_factor. Raises
    UnsupportedModelError."""
    fields: dict[str, Any] = {"rope_theta": file.get("rope.freq_base", 10000.0)}
    scaling = scaling_of(file)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    if turns_partly:
        fields["partial_rotary_factor"] = file.number("rope.dimension_count", file.head_dim) / file.head_dim
    return fields


def scaling_of(file: GgufFile) -> dict[str, Any] | None:
    """rope_scaling as transformers has it; None: none."""
    kind = file.get("rope.scaling.type", "none")
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0))
    if _FREQUENCIES in file.tensors:
        return _by_frequency(file)
    if _LONG in file.tensors and _SHORT in file.tensors:
        original = file.get("rope.scaling.original_context_length", file.number("context_length"))
        factors = {"short_factor": file.floats(_SHORT), "long_factor": file.floats(_LONG)}
        return {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, factor)
    raise UnsupportedModelError(
        f"{file.name}: rope.scaling.type {kind!r} is not read; read are none, linear, yarn, and factors in tensors."
    )


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    names = {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_attn_factor": "attention_factor", "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }  # fmt: skip
    if file.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise UnsupportedModelError(f"{file.name}: rope.scaling.yarn_ext_factor is served with 1 alone.")
    found = {name: file.get(key) for key, name in names.items()}
    return {"rope_type": "yarn", "factor": factor, **{name: one for name, one in found.items() if one is not None}}


def _by_frequency(file: GgufFile) -> dict[str, Any]:
    """Each frequency is divided by a number of its own: Llama 3's, or others, which "longrope" takes as they are."""
    factors = file.floats(_FREQUENCIES)
    theta, size = file.get("rope.freq_base", 10000.0), 2 * len(factors)
    factor = max(factors)
    wanted = [_llama3_factor(theta ** (-2 * number / size), factor) for number in range(len(factors))]
    if factor > 1.0 and all(abs(one - other) <= _CLOSE * one for one, other in zip(wanted, factors, strict=True)):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    context = file.number("context_length")
    both = {"short_factor": factors, "long_factor": factors}
    return {"rope_type": "longrope", **both, "original_max_position_embeddings": context, "attention_factor": 1.0}


def _llama3_factor(frequency: float, factor: float) -> float:
    low, high, original = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
    turns = original * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
