"""adapter_config.json, read through PEFT's own class (https://huggingface.co/docs/peft) and checked.

Whatever changes the arithmetic is done or refused: no field is ignored because nobody knows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.checkpoint import strict_json
from quire.errors import AdapterError

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 4096
_MOST_ALPHA = 1e9
_MOST_NAMES = 20_000  # in a list
_LONGEST_NAME = 256  # characters

# What quire does; PEFT's class checks them against each other.
_APPLIED_FIELDS = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "lora_bias",
    "modules_to_save", "trainable_token_indices", "fan_in_fan_out", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "ensure_weight_tying", "target_parameters",
})  # fmt: skip
# What says nothing of the arithmetic of an adapter that is trained.
_FIELDS_WITHOUT_EFFECT = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "megatron_core",
    "qalora_group_size", "runtime_config", "init_lora_weights",
})  # fmt: skip
# How an adapter began to be trained. The others (pissa, olora, corda, loftq, lora_ga, mica) change the base model, and
# the adapter is no longer right on the plain one.
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_CONVERT = "save it as plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"


def read_config(data: bytes, where: str) -> LoraConfig:
    """Return the configuration in the file's bytes. Raises AdapterError, whose text begins with `where`."""
    raw = _parse(data, where)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{where}: peft_type={kind!r}: only LORA adapters are served.")
    for field, value in raw.items():
        if field not in _APPLIED_FIELDS and field not in _FIELDS_WITHOUT_EFFECT and not _is_neutral(value):
            raise AdapterError(
                f"{where}: the field {field}={_short(value)} is not served, and ignoring it could give wrong answers."
            )
    if raw.get("init_lora_weights") not in _HARMLESS_STARTS:
        start = _short(raw["init_lora_weights"])
        raise AdapterError(f"{where}: init_lora_weights={start} changes the base model's weights: {_CONVERT}.")
    _check_values(raw, where)
    return _build(
        {field: value for field, value in raw.items() if field in _APPLIED_FIELDS and value is not None}, where
    )


def base_model_of(data: bytes) -> str | None:
    """What a configuration that was read says that the adapter was trained on, as text that can be shown: JSON's
    strings may have halves of surrogate pairs, which no answer can have.
    """
    named = _parse(data, CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return None
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in named[:_LONGEST_NAME])


def task_of(data: bytes) -> str | None:
    """What a configuration that was read says that the adapter was trained for: PEFT's task_type."""
    task = _parse(data, CONFIG_FILE).get("task_type")
    return task if isinstance(task, str) else None


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        raw = strict_json.parse(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{where}: is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{where}: holds a JSON {type(raw).__name__}, not an object.")
    return raw


def _build(fields: Mapping[str, Any], where: str) -> LoraConfig:
    from peft import LoraConfig

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LoraConfig(**fields)
    except Exception as error:  # PEFT's class raises all kinds
        raise AdapterError(f"{where}: PEFT does not take it: {error}") from None


def _check_values(raw: Mapping[str, Any], where: str) -> None:
    _check_rank(raw.get("r", 8), "r", where)
    _check_alpha(raw.get("lora_alpha", 8), "lora_alpha", where)
    for field, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_alpha)):
        patterns = {} if raw.get(field) is None else raw[field]
        if not isinstance(patterns, dict):
            raise AdapterError(f"{where}: {field}={_short(patterns)}: must be an object of names and numbers.")
        for name, value in patterns.items():
            check(value, f"{field}[{name!r}]", where)
    if raw.get("bias", "none") not in ("none", "all", "lora_only"):
        raise AdapterError(f"{where}: bias={_short(raw['bias'])}: must be none, all or lora_only.")
    for field in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"):
        if raw.get(field) not in (None, True, False):
            raise AdapterError(f"{where}: {field}={_short(raw[field])}: must be true or false.")
    for field in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"):
        value = raw.get(field)
        if isinstance(value, list) and len(value) > _MOST_NAMES:
            raise AdapterError(f"{where}: {field} has {len(value):,} names, and at most {_MOST_NAMES:,} are taken.")
        may_be_text = field not in ("modules_to_save", "target_parameters")
        if value is None or (may_be_text and isinstance(value, str)) or _is_list_of(str, value):
            continue
        raise AdapterError(f"{where}: {field}={_short(value)}: must be a list of names{' or a pattern' * may_be_text}.")
    layers = raw.get("layers_to_transform")
    if layers is not None and type(layers) is not int and not _is_list_of(int, layers):
        raise AdapterError(f"{where}: layers_to_transform={_short(layers)}: must be a number or a list of numbers.")
    _check_tokens(raw.get("trainable_token_indices"), where)


def _check_rank(value: Any, name: str, where: str) -> None:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{where}: {name}={_short(value)}: must be a whole number from 1 to {MAX_RANK}.")


def _check_alpha(value: Any, name: str, where: str) -> None:
    if type(value) not in (int, float) or not -_MOST_ALPHA <= value <= _MOST_ALPHA:
        raise AdapterError(f"{where}: {name}={_short(value)}: must be a number, of at most {_MOST_ALPHA:g}.")


def _check_tokens(tokens: Any, where: str) -> None:
    lists = list(tokens.values()) if isinstance(tokens, dict) else [] if tokens is None else [tokens]
    for ids in lists:
        if not _is_list_of(int, ids) or not ids or len(set(ids)) != len(ids) or any(i < 0 for i in ids):
            raise AdapterError(f"{where}: trainable_token_indices={_short(ids)}: must be a list of distinct token ids.")


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
