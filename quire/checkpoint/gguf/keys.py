"""Keys of a GGUF file's architecture that nobody has read: what they may say.

A family reads what its class has a field for. Any other key is refused, unless its value is what is computed anyway, or
it is a note: llama.cpp reads some in every family, and writers write them all. Which value is none, its sources say
(https://github.com/ggml-org/llama.cpp, src/llama-hparams.h and llama-model.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from quire.checkpoint.gguf.family import Family
from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.rope import FACTORS
from quire.errors import UnsupportedModelError

# What changes no number, or is held against tensors' shapes: sizes of layers, and which of them have experts.
_NOTES = frozenset({
    "vocab_size", "context_length", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "leading_dense_block_count", "tensor_data_layout", "classifier.output_labels",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",  # of norms that the class does not have
    "rope.freq_base",  # of a family that turns nothing
    "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
# Of towers for images and sounds, whose tensors stand in files of their own: a model's text model is served alone.
_OTHER_PARTS = ("vision.", "audio.", "mm.")
_WAY_OUT = "Take the model's safetensors, if `quire models` has its class."
_NONE = (0, 0.0)
_ONCE = (0.0, 1.0)
# Key -> the values that ask for nothing.
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "attention.causal": (True,), "attention.rope_pattern": (1, True), "attention.output_scale": _ONCE,
    "attention.value_scale": _ONCE, "deepstack_mapping": (-1,), "embedding_scale": _ONCE, "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "expert_weights_scale": _ONCE, "interleave_moe_layer_step": (0, 1),
    "logit_scale": _ONCE, "pooling_type": (0, 3), "residual_scale": _ONCE, "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": _ONCE, "rope.scaling.type": ("none", "linear"), "rope.scale_linear": _ONCE,
    "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.yarn_ext_factor": (-1.0, 0.0),
}  # fmt: skip


def check_keys(file: GgufFile, family: Family) -> None:
    """Raises UnsupportedModelError for a key that would have to be ignored."""
    start = f"{file.architecture}."
    for whole in file.metadata:
        key = whole.removeprefix(start)
        if key == whole or key in file.asked:
            continue
        value = file.value(key)
        if not _is_neutral(file, family, key, value):
            raise UnsupportedModelError(
                f"{file.name}: {whole} is {repr(value)[:60]}, which {family.architecture} does not compute, and to "
                f"ignore it could give wrong answers. {_WAY_OUT}"
            )
    for name in FACTORS:
        if name in file.tensors and name not in file.asked:
            raise UnsupportedModelError(f"{file.name}: {family.architecture} has no use for {name}. {_WAY_OUT}")


def _is_neutral(file: GgufFile, family: Family, key: str, value: Any) -> bool:
    if key in family.facts:
        return _is_one_of(value, family.facts[key])
    if key in _NOTES or key.startswith(_OTHER_PARTS):
        return True
    if key == "attention.sliding_window_pattern":
        return not file.value("attention.sliding_window")
    same = _same_as(file, key)
    if same is not None and _is_one_of(value, same):
        return True
    return _is_one_of(value, _NEUTRAL.get(key, _NONE))


def _same_as(file: GgufFile, key: str) -> Collection[Any] | None:
    """Values that follow from others of the file."""
    if key == "attention.head_count_kv":
        return (file.heads[0],)
    if key in (
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_swa",
        "attention.value_length_swa",
    ):
        return (file.head_dim,)
    if key == "attention.scale":
        return (0.0, file.head_dim**-0.5)
    if key == "rope.dimension_count":
        return (file.head_dim,)
    if key == "rope.dimension_count_swa":
        return (file.value("rope.dimension_count") or file.head_dim,)
    if key == "rope.freq_base_swa":
        return (file.value("rope.freq_base") or 10000.0,)
    return None


def _is_one_of(value: Any, wanted: Collection[Any]) -> bool:
    """An array: all of it. Truth values are no numbers here, but for False, which asks for nothing as 0 does."""
    if isinstance(value, list):
        return all(_is_one_of(one, wanted) for one in value)
    if isinstance(value, float):
        return any(type(one) in (int, float) and math.isclose(value, one, rel_tol=1e-5) for one in wanted)
    if value is False and 0 in wanted:
        return True
    return any(type(value) is type(one) and value == one for one in wanted)
