"""From a GGUF file's metadata to a config.json: the same fields, which then go through the same checks.

Keys are llama.cpp's (https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py), which call sizes the same in
all families: `FIELDS` says what transformers calls them. `FAMILIES` has, for each general.architecture, its own; what
no key says (activations, which norms) is what the published models of that family compute. A file that asks for
something that transformers' class has no field for is refused (`keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.gguf.families import FAMILIES, REFUSED
from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.keys import check_keys
from quire.checkpoint.gguf.rope import rotation
from quire.checkpoint.gguf.special import token_id
from quire.errors import CheckpointError, UnsupportedModelError

# What config.json calls the form of the weights.
METHOD = "gguf"
_RMS_NORM, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Keys behind the architecture's name -> fields.
FIELDS: Mapping[str, str] = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", _RMS_NORM: "rms_norm_eps",
    "attention.key_length": "head_dim", "block_count": "num_hidden_layers",
}  # fmt: skip
# Those that must be there: a class's defaults are other models'.
_NEEDED = frozenset({
    "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "expert_used_count",
    _RMS_NORM, _LAYER_NORM,
})  # fmt: skip
_REALS = frozenset({
    _RMS_NORM, _LAYER_NORM, "attn_logit_softcapping", "final_logit_softcapping",
})  # fmt: skip
_FLAGS = frozenset({"use_parallel_residual"})
# Tokens -> fields.
TOKENS: Mapping[str, str] = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields of a config.json. Raises UnsupportedModelError, CheckpointError."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        why = REFUSED.get(file.architecture)
        if why is not None:
            raise UnsupportedModelError(
                f"{file.name}: GGUF files of general.architecture {file.architecture!r} are not read: {why}. Take the "
                "model's safetensors."
            )
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"{file.name}: GGUF files of general.architecture {file.architecture!r} are not read; read are: {known}. "
            "Take the model's safetensors, if `quire models` has its class."
        )
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(f"{file.name}: general.type is {repr(kind)[:60]}: it holds no model that answers.")
    config: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    fields = {**FIELDS, **family.fields}
    if fields.get(_LAYER_NORM):
        fields.pop(_RMS_NORM)
    for key, name in fields.items():
        value = _value(file, key) if name else None
        if value is not None:
            config[name] = value
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.name}: has no tensor token_embd.weight of two dimensions, the embeddings.")
    config["vocab_size"] = embedding.shape[0]
    config.update(family.fixed)
    config.update({name: file.has(tensor) for name, tensor in family.present.items()})
    if family.rotates:
        config.update(rotation(file, family.turns_partly))
    config.update(family.more(file))
    config.update(special_tokens(file))
    config["dtype"] = dtype_of(file)
    config["quantization_config"] = {"quant_method": METHOD}
    check_keys(file, family)
    return config


def _value(file: GgufFile, key: str) -> Any:
    """Of a key that is a field. None: it is not there, and need not be."""
    if key == "block_count":
        return file.layers
    if key == "attention.head_count_kv":
        file.asked.add(key)
        return file.heads[1]  # as many as of queries, unless it is there
    if key == "attention.key_length":
        return _head_dim(file)
    # A model of experts alone has no layer of that size; shapes say it.
    sparse = key == "feed_forward_length" and file.says("expert_count")
    if key == "expert_used_count" and not file.get("expert_count", 0):
        return None
    needed = key in _NEEDED and not sparse
    if not needed and not file.says(key):
        return None
    if key in _REALS:
        return file.real(key)
    return file.flag(key) if key in _FLAGS else file.number(key, least=int(needed))


def _head_dim(file: GgufFile) -> int | None:
    """None where no key says it: the class has its own rule, which the projections' shapes are held against."""
    size = file.head_dim if file.says("attention.key_length") else None
    file.asked.add("attention.key_length")
    return size


def special_tokens(file: GgufFile) -> dict[str, Any]:
    """Ids of tokens, null where there is none: a class's defaults are other vocabularies'. Whatever ends a turn ends an
    answer."""
    found: dict[str, Any] = {name: token_id(file, key) for key, name in TOKENS.items()}
    turn = [token_id(file, key) for key in ("eot", "eom")]
    ends = [one for one in dict.fromkeys([found["eos_token_id"], *turn]) if one is not None]
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return found


def dtype_of(file: GgufFile) -> str:
    """Of a file of plain numbers, theirs. Of one with quantized matrices, float32: between them are float32 numbers, as
    llama.cpp has them, and a 16-bit dtype would lose more than 8-bit weights do."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({1}): "float16", frozenset({30}): "bfloat16"}.get(frozenset(kinds - {0} or kinds), "float32")
