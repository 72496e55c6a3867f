"""What a GGUF file says of rotary positions, as transformers' fields."""

from __future__ import annotations

import math
from typing import Any

from quire.checkpoint.gguf.file import GgufFile
from quire.errors import CheckpointError, UnsupportedModelError

_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (_FREQUENCIES, _LONG, _SHORT)
# What the published models with "llama3" have; a file keeps what follows of it, for each frequency.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CLOSE = 1e-5
_KINDS = ("none", "linear", "yarn", "longrope")


def rotation(file: GgufFile, turns_partly: bool) -> dict[str, Any]:
    """rope_theta, rope_scaling and, of families that turn a part of a head, partial_rotary_factor. Raises
    UnsupportedModelError, CheckpointError."""
    fields: dict[str, Any] = {"rope_theta": base_of(file)}
    turned = file.number("rope.dimension_count", file.head_dim) if turns_partly else file.head_dim
    if turned > file.head_dim or turned % 2:
        raise CheckpointError(
            f"{file.name}: {file.architecture}.rope.dimension_count is {turned}: it must be even, and up to "
            f"{file.head_dim}, a head's size."
        )
    scaling = scaling_of(file, fields["rope_theta"], turned)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    if turns_partly:
        fields["partial_rotary_factor"] = turned / file.head_dim
    return fields


def base_of(file: GgufFile) -> float:
    """Raises CheckpointError."""
    base = file.real("rope.freq_base", 10000.0)
    if base <= 0:
        raise CheckpointError(f"{file.name}: {file.architecture}.rope.freq_base is {base:g}: it must be above 0.")
    return base


def scaling_of(file: GgufFile, base: float, turned: int) -> dict[str, Any] | None:
    """rope_scaling as transformers has it; None: none. turned: dimensions of a head. A factor without a type is that
    of "linear", as llama.cpp has it, and one beside "none" does nothing. Raises UnsupportedModelError."""
    kind = file.get("rope.scaling.type", "linear")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{file.name}: rope.scaling.type {repr(kind)[:40]} is not read; read are {', '.join(_KINDS)}."
        )
    old = file.real("rope.scale_linear", 1.0)
    factor = file.real("rope.scaling.factor", old) or 1.0
    if factor < 0:
        raise UnsupportedModelError(f"{file.name}: rope.scaling.factor is {factor:g}: it must be above 0.")
    tables = [name for name in FACTORS if name in file.tensors]
    if tables:
        if kind == "yarn" or (kind != "none" and factor != 1.0) or tables not in ([_FREQUENCIES], [_LONG, _SHORT]):
            raise UnsupportedModelError(
                f"{file.name}: has {', '.join(tables)} with rope.scaling.type {kind!r} and factor {factor:g}; served "
                f"are {_FREQUENCIES} alone, or {_LONG} and {_SHORT}, without another scaling."
            )
        if tables == [_FREQUENCIES]:
            return _by_frequency(file, base, turned)
        return _by_length(file, turned)
    if kind == "longrope":
        raise UnsupportedModelError(f"{file.name}: rope.scaling.type is 'longrope', without {_LONG} and {_SHORT}.")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return _yarn(file, factor)


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    if file.real("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise UnsupportedModelError(f"{file.name}: rope.scaling.yarn_ext_factor is served with 1 alone.")
    names = {
        "rope.scaling.yarn_attn_factor": "attention_factor", "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }  # fmt: skip
    found: dict[str, Any] = {name: file.real(key) for key, name in names.items() if file.says(key)}
    if file.says("rope.scaling.original_context_length"):
        found["original_max_position_embeddings"] = file.number("rope.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": factor, **found}


def _by_length(file: GgufFile, turned: int) -> dict[str, Any]:
    """Each frequency is divided by a number of its own, and by another in long texts."""
    original = file.number("rope.scaling.original_context_length", file.number("context_length"))
    factors = {"short_factor": _factors(file, _SHORT, turned), "long_factor": _factors(file, _LONG, turned)}
    found = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    if file.says("rope.scaling.attn_factor"):
        found["attention_factor"] = file.real("rope.scaling.attn_factor")
    return found


def _factors(file: GgufFile, name: str, turned: int) -> list[float]:
    found = file.floats(name)
    if len(found) != turned // 2 or not all(0 < one < math.inf for one in found):
        raise CheckpointError(f"{file.places[name]}: {name} must be {turned // 2} numbers above 0.")
    return found


def _by_frequency(file: GgufFile, base: float, turned: int) -> dict[str, Any]:
    """Each frequency is divided by a number of its own: Llama 3's, or others, which "longrope" takes as they are."""
    factors = _factors(file, _FREQUENCIES, turned)
    factor = max(factors)
    wanted = [_llama3_factor(base ** (-2 * number / turned), factor) for number in range(len(factors))]
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
