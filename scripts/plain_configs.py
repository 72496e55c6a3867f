"""Write quire/checkpoint/plain_configs.json: what transformers' classes fill in where config.json is silent.

python scripts/plain_configs.py            # after an upgrade of transformers that tests/checkpoint complains of
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

TABLE = Path(__file__).parents[1] / "quire" / "checkpoint" / "plain_configs.json"
TOKENIZER_CLASSES = ("GPT2Tokenizer", "Qwen2Tokenizer")
MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "opt")
# Transformers changes the expressions of their tokenizers, or takes Mistral's own library where that is installed.
_OF_MISTRAL = ("mistral", "mistral3", "mixtral", "ministral", "ministral3", "pixtral", "voxtral")
_WORDS = {int: "int", float: "float", bool: "bool", str: "str", types.NoneType: "null", list: "list"}


def kinds(annotation: Any) -> list[str]:
    """The JSON values that an annotation allows for certain, by their types; others are not listed."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return sorted({word for part in args for word in kinds(part)})
    if origin is list and args in ((int,), (str,)):
        return [f"list[{_WORDS[args[0]]}]"]
    return [_WORDS[annotation]] if annotation in _WORDS else []


def fields_of(kind: type[PretrainedConfig]) -> dict[str, list[Any]]:
    """Each field's default, and the types of the values that it takes."""
    hints = typing.get_type_hints(kind, localns={"torch": torch})
    found = {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        assert one.default_factory is dataclasses.MISSING, one.name
        found[one.name] = [one.default, kinds(hints[one.name])]
    return found


def entry(model_type: str) -> dict[str, Any]:
    kind = CONFIG_MAPPING[model_type]
    base = fields_of(PretrainedConfig)
    return {
        "class": kind.__name__,
        "fields": {name: one for name, one in sorted(fields_of(kind).items()) if base.get(name) != one},
        "attribute_map": dict(kind.attribute_map),
        "default_theta": kind.default_theta if hasattr(kind, "rope_parameters") else None,
        "names": sorted(names(kind) - names(PretrainedConfig)),
    }


def tokenizers() -> list[str]:
    """Kinds of models of which transformers takes a tokenizer.json as it is, where tokenizer_config.json says so."""
    found = []
    for model_type in CONFIG_MAPPING:
        registered = (TOKENIZER_MAPPING_NAMES.get(model_type) or "").removesuffix("Fast")
        replaced = model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS and registered != "TokenizersBackend"
        if not replaced and registered != "MistralCommonBackend" and model_type not in _OF_MISTRAL:
            found.append(model_type)
    return sorted(found)


def tokenizer_classes() -> dict[str, str]:
    """Tokenizers' classes -> the kinds of models for which transformers takes that one, if the files name it."""
    found = {}
    for name in TOKENIZER_CLASSES:
        kinds = [one for one in CONFIG_MAPPING if TOKENIZER_MAPPING_NAMES.get(one) in (None, name)]
        found[name] = " ".join(sorted(one for one in kinds if one not in _OF_MISTRAL))
    return found


def pipelines() -> dict[str, Any]:
    """Tokenizers' classes -> what one makes tokens with, as its tokenizer.json would say it."""
    found = {}
    for name in TOKENIZER_CLASSES:
        saved = json.loads(getattr(transformers, name)(vocab={"a": 0}, merges=[]).backend_tokenizer.to_str())
        found[name] = {part: saved[part] for part in ("normalizer", "pre_tokenizer", "decoder")}
    return found


def names(kind: type[PretrainedConfig]) -> set[str]:
    """What a class has of its own accord: a key of config.json with such a name may do more than be kept."""
    own = {*dir(kind), *inspect.signature(kind.__init__).parameters}
    return {name for name in own if not name.startswith("__")}


def table() -> dict[str, Any]:
    return {
        "fields": dict(sorted(fields_of(PretrainedConfig).items())),
        "names": sorted(names(PretrainedConfig)),
        "tokenizers": tokenizers(),
        "tokenizer_classes": tokenizer_classes(),
        "pipelines": pipelines(),
        "generation": sorted(GenerationConfig._get_default_generation_params()),
        "types": {model_type: entry(model_type) for model_type in MODEL_TYPES},
    }


def text() -> str:
    """The file's content: a line for each field and each type."""
    found = table()
    for part in (found, *found["types"].values()):
        part["names"] = " ".join(part["names"])
    found["tokenizers"] = " ".join(found["tokenizers"])
    return _lines(found, depth=4) + "\n"


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """As JSON, objects down to that depth over several lines."""
    if not isinstance(value, dict) or not value or not depth:
        return json.dumps(value)
    inner = (f"{indent} {json.dumps(key)}: {_lines(one, depth - 1, indent + ' ')}" for key, one in value.items())
    return "{\n" + ",\n".join(inner) + f"\n{indent}}}"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
