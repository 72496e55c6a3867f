"""config.json of plain architectures, read without transformers, whose import takes longer than the rest of a start.

What comes out has the attributes of transformers' own configuration object, all of them and no others: the defaults of
its class are in plain_configs.json (`scripts/plain_configs.py` writes it), what its class makes of several fields is
done here. `tests/checkpoint/test_plain_config.py` holds the two equal. Whatever is not certain is left to transformers:
it takes what it takes, refuses what it refuses, and warns as it does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

_TABLE = Path(__file__).with_name("plain_configs.json")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of fields that no class has: their objects are kept as they are.
_OBJECTS = {"quantization_config", "task_specific_params", "auto_map", "transformers.js_config"}
# Fields that make transformers do more than keep them.
_SPECIAL = {
    "name_or_path", "attn_implementation", "experts_implementation", "output_attentions", "configuration_files",
    "text_config", "vision_config", "layer_types", "mlp_layer_types", "mtp_layer_types", "partial_rotary_factor",
    "embed_dim", "num_heads",
}  # fmt: skip
# What rotary embeddings of these types need beside their base, and may have.
_ROPE = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
_LAYERS = {"full_attention", "sliding_attention"}


class PlainConfig:
    """A configuration, read here. There is a class for each model_type; `vars` gives what `vars` of transformers' does.

    What only transformers' class can do (`to_dict`, say) is asked of it, which is imported then.
    """

    __slots__ = ("__dict__", "_folder")
    model_type: ClassVar[str] = ""
    attribute_map: ClassVar[Mapping[str, str]] = {}
    own_names: ClassVar[frozenset[str]] = frozenset()  # what transformers' class has, whatever a file brings
    is_heterogeneous: ClassVar[bool] = False

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self._folder = folder
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).attribute_map:
            return getattr(self, type(self).attribute_map[name])
        if name == "rope_scaling":
            return self.rope_parameters
        if name in type(self).own_names:
            return getattr(self.of_transformers(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, type(self).attribute_map.get(name, name), value)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PlainConfig:
        """Itself: it has no parts."""
        return self

    def of_transformers(self) -> Any:
        """The same as an object of transformers' class."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._folder, trust_remote_code=False, local_files_only=True)
        config.__dict__.update(copy.deepcopy(self.__dict__))
        return config


class _Uncertain(Exception):
    """It is transformers' to say what a file means."""


def read_plain(folder: Path, raw: Mapping[str, Any]) -> PlainConfig | None:
    """The configuration in a folder's config.json, whose content is `raw`; None where transformers must read it."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _table()["types"]:
        return None
    try:
        values = _values(kind, raw)
    except (_Uncertain, ArithmeticError):
        return None
    values["_name_or_path"] = str(folder)
    return _class_of(kind)(folder, values)


def plain_tokenizer(model_type: Any) -> bool:
    """Whether transformers takes a tokenizer.json of this kind of model as it is, if tokenizer_config.json says so."""
    return isinstance(model_type, str) and model_type in _table()["tokenizers"].split()


def tokenizer_pipeline(name: str, model_type: Any) -> dict[str, Any] | None:
    """What transformers' class of that name makes tokens with (parts of a tokenizer.json), where it is taken for such a
    model; None: that is not known."""
    kinds = _table()["tokenizer_classes"].get(name, "").split()
    return cast(dict[str, Any], _table()["pipelines"][name]) if model_type in kinds else None


@cache
def _table() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(_TABLE.read_text(encoding="utf-8")))


@cache
def _class_of(kind: str) -> type[PlainConfig]:
    table, one = _table(), _table()["types"][kind]
    names = frozenset([*table["names"].split(), *one["names"].split(), *table["fields"], *one["fields"]])
    members = {"__slots__": (), "model_type": kind, "attribute_map": one["attribute_map"], "own_names": names}
    return type(one["class"], (PlainConfig,), members)


def _values(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """All attributes. Raises _Uncertain."""
    one = _table()["types"][kind]
    fields = {**_table()["fields"], **one["fields"]}
    values = {name: default for name, (default, _) in fields.items()}
    others: dict[str, Any] = {}
    theta = one["default_theta"]
    given, scaling, old_dtype = raw.get("rope_parameters"), None, None
    for name, value in raw.items():
        if name == "torch_dtype":
            old_dtype = value
        elif theta is not None and name in ("rope_theta", "rope_scaling", "rope_parameters"):
            scaling = value if name == "rope_scaling" else scaling
            theta = value if name == "rope_theta" else theta
        elif name in fields:
            _check_type(name, value, fields[name][1])
            values[name] = copy.copy(value)
        elif name not in _table()["generation"]:
            _check_other(kind, name, value)
            others[name] = copy.deepcopy(value)
    values["dtype"] = _dtype(values["dtype"], old_dtype)
    _derive(kind, values)
    if one["default_theta"] is not None:
        values["rope_parameters"] = _rope(kind, scaling or given, theta, values)
    # An attribute of classifiers, which all classes have.
    values["id2label"], values["label2id"] = {0: "LABEL_0", 1: "LABEL_1"}, {"LABEL_0": 0, "LABEL_1": 1}
    values.update(
        _output_attentions=False, _attn_implementation_internal=None, _experts_implementation_internal=None,
        _post_init_done=True,
    )  # fmt: skip
    values |= others
    size = values["vocab_size"]
    if any(name.endswith("_token_id") and isinstance(id_, int) and not 0 <= id_ < size for name, id_ in values.items()):
        raise _Uncertain  # it warns
    return values


def _check_type(name: str, value: Any, allowed: list[str]) -> None:
    word = "null" if value is None else type(value).__name__
    if word == "list":
        inner = {type(one).__name__ for one in value}
        word = f"list[{inner.pop()}]" if len(inner) == 1 else "?"
    if word not in allowed or (name == "initializer_range" and not 0 <= value <= 1):
        raise _Uncertain


def _check_other(kind: str, name: str, value: Any) -> None:
    """Of a field that the class does not have: whether it is kept as it is, and no more."""
    if name in ("model_type", "_name_or_path") and isinstance(value, str):
        return
    names = _class_of(kind).own_names
    if name.startswith("_") or name in names or name in _class_of(kind).attribute_map:
        raise _Uncertain
    if name in _SPECIAL or (isinstance(value, dict) and name not in _OBJECTS):
        raise _Uncertain


def _dtype(given: Any, old: Any) -> torch.dtype | None:
    name = old if given is None else given
    if name is not None and name not in _DTYPES:
        raise _Uncertain
    return None if name is None else _DTYPES[name]


def _derive(kind: str, values: dict[str, Any]) -> None:
    """What a class makes of its fields."""
    rule = _RULES.get(kind)
    if rule is not None:
        rule(values)
    layers = values.get("layer_types")
    if layers is not None and (not _LAYERS.issuperset(layers) or len(layers) != values["num_hidden_layers"]):
        raise _Uncertain
    head_dim = values.get("head_dim")
    if head_dim is not None and head_dim > 4 and head_dim % 2:
        raise _Uncertain


def _kv_heads(values: dict[str, Any]) -> None:
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]


def _heads(values: dict[str, Any]) -> None:
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    _kv_heads(values)


def _llama(values: dict[str, Any]) -> None:
    _heads(values)
    if values["hidden_size"] % values["num_attention_heads"]:
        raise _Uncertain


def _qwen(values: dict[str, Any]) -> None:
    if not values["use_sliding_window"]:
        values["sliding_window"] = None
    _kv_heads(values)
    if values["layer_types"] is None:
        slide = values["max_window_layers"] if values["sliding_window"] is not None else values["num_hidden_layers"]
        layers = range(values["num_hidden_layers"])
        values["layer_types"] = ["sliding_attention" if one >= slide else "full_attention" for one in layers]


def _gemma(values: dict[str, Any]) -> None:
    if values["hidden_act"] == "gelu":  # what old files call it
        values["hidden_act"] = "gelu_pytorch_tanh"


def _opt(values: dict[str, Any]) -> None:
    if values["word_embed_proj_dim"] is None:
        values["word_embed_proj_dim"] = values["hidden_size"]


_RULES: dict[str, Callable[[dict[str, Any]], None]] = {
    "llama": _llama, "mistral": _heads, "mixtral": _kv_heads, "qwen2": _qwen, "qwen3": _qwen, "phi3": _kv_heads,
    "gemma": _gemma, "opt": _opt,
}  # fmt: skip


def _rope(kind: str, given: Any, theta: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters, of the old fields or the new one. Raises _Uncertain."""
    if given is not None and not isinstance(given, dict):
        raise _Uncertain
    rope = copy.deepcopy(given or {})
    rope.setdefault("rope_theta", theta)
    if kind == "phi3":
        rope.setdefault("partial_rotary_factor", 1.0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    name = rope["rope_type"]
    if not isinstance(name, str) or name not in _ROPE or (kind == "phi3" and name != "default"):
        raise _Uncertain
    if name == "llama3":
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    needed, allowed = _ROPE[name]
    known = {"type", "rope_type", "rope_theta", *needed, *allowed, *(["partial_rotary_factor"] * (kind == "phi3"))}
    numbers = [rope.get(one) for one in ("rope_theta", *needed)]
    if not known.issuperset(rope) or any(type(one) not in (int, float) for one in numbers):
        raise _Uncertain
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("factor", 1.0) < 1.0:
        raise _Uncertain
    if name == "llama3":
        low, high, length = (rope[one] for one in needed[1:])
        if high <= low or type(length) is not int or length >= values["max_position_embeddings"]:
            raise _Uncertain
    return rope
