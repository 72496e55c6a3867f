"""The table of settings: what is made of it is what it says, at every door."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncEngineArgs, EngineArgs
from quire.config import EngineConfig, LaunchConfig, RequestDefaults, ServerConfig, write
from quire.config.arguments import engine_config, llm_settings
from quire.config.setting import Kind, Setting
from quire.config.settings import ENGINE_PARTS, FIELDS, SETTINGS, at, engine_settings, make
from quire.config.typed_arguments import LLMArguments
from quire.config.vllm_names import NAMES
from quire.errors import QuireError

CONFIGURATIONS = (*ENGINE_PARTS.values(), EngineConfig, ServerConfig, RequestDefaults, LaunchConfig)

# argument -> (what is given, what the field is then), where the one is not the other.
OTHER_FORMS: dict[str, tuple[Any, Any]] = {
    "hf_token": ("True", True),
    "limit_mm_per_prompt": ({"image": 3}, {"image": 3, "video": 8, "audio": 8}),
    "media_io_kwargs": ({"video": {"num_frames": 8}}, {"video": {"num_frames": 8}}),
    "swap_space": (0.5, 1 << 29),
    "allowed_media_domains": (["a", "b"], ("a", "b")),
    "lora_roots": (["/a"], ("/a",)),
    "generation_config": ("vllm", "vllm"),
    "metrics_prefix": ("vllm:", "vllm:"),
    "kv_cache_dtype": ("int8", "int8"),
    "speculative_config": ({"method": "suffix"}, {"method": "suffix"}),
    "kv_transfer_config": ({"kv_connector": "package:Class"}, {"kv_connector": "package:Class"}),
}


def another_value(row: Setting) -> tuple[Any, Any]:
    """What may be given for a setting, and what its field is then: never the default."""
    if row.name in OTHER_FORMS:
        return OTHER_FORMS[row.name]
    if row.choices:
        value: Any = next(choice for choice in row.choices if choice != row.default)
    elif row.kind is Kind.SWITCH:
        value = not row.default
    elif row.kind is Kind.TEXTS:
        return ["a"], ("a",)
    elif row.kind is Kind.OBJECT:
        value = {"a": 1}
    elif row.kind is Kind.TEXT:
        value = "another"
    else:
        value = 0.5 if row.kind is Kind.NUMBER else 7
    return value, value


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_every_field_is_a_row(config: Any) -> None:
    rows = {row.field for row in FIELDS if row.config is config}
    assert {field.name for field in dataclasses.fields(config)} - rows == (
        set(ENGINE_PARTS) if config is EngineConfig else set()
    )
    assert typing.get_type_hints(config) and config() == config()


def test_names_flags_and_variables_stand_for_one_setting() -> None:
    for door in ("LLM", "EngineArgs", "serve"):
        names = [row.name for row in at(door)]
        assert len(names) == len(set(names))
    flags = [flag for row in at("serve") for flag in row.all_flags]
    variables = [name for row in at("serve") for name in (row.variable, *row.variables)]
    assert len(flags) == len(set(flags)) and len(variables) == len(set(variables))
    assert all(row.help.endswith((".", "vllm:")) and row.doors for row in SETTINGS)


@pytest.mark.parametrize("row", engine_settings(), ids=lambda row: row.name)
def test_an_argument_of_the_engine_sets_its_field(row: Setting) -> None:
    given, value = another_value(row)
    assert value != row.default
    made = engine_config(**{row.name: given})
    part = next((getattr(made, part) for part, config in ENGINE_PARTS.items() if config is row.config), made)
    assert getattr(part, row.field) == value
    # and nothing else
    names = {config: part for part, config in ENGINE_PARTS.items()}
    changed = dataclasses.replace(part, **{row.field: row.default})
    whole = changed if row.config is EngineConfig else dataclasses.replace(made, **{names[row.config]: changed})
    assert whole == EngineConfig()


@pytest.mark.parametrize("row", [row for row in SETTINGS if row not in engine_settings()], ids=lambda row: row.name)
def test_an_option_sets_its_field(row: Setting) -> None:
    given, value = another_value(row)
    both = {"ssl_keyfile": "a", "ssl_certfile": "b"} if row.name.startswith("ssl_") else {}
    if row.name == "chat_template":
        given = value = "{{ messages }}"
    assert getattr(make(row.config, {**both, row.name: given}), row.field) == value != row.default


@pytest.mark.parametrize(
    "row", [row for row in FIELDS if not row.secret], ids=lambda row: f"{row.config.__name__}.{row.field}"
)
def test_a_value_out_of_bounds_is_refused_by_its_field_s_name(row: Setting) -> None:
    wrong: list[Any] = [object()]
    if row.at_least is not None:
        wrong.append(row.at_least - 1)
    if row.at_most is not None:
        wrong.append(row.at_most + 1)
    if row.above is not None:
        wrong.append(row.above)
    if row.choices:
        wrong.append("none of them")
    for value in wrong:
        with pytest.raises(QuireError, match=rf"^{row.field}[=:]"):
            row.config(**{row.field: value})


@pytest.mark.parametrize(
    ("argument", "value", "refusal"),
    [
        ("load_format", 1, "load_format=1: is one of auto, safetensors, pt."),
        ("hf_token", 1.5, "hf_token: must be a text, or True for the one that is stored."),
        ("hf_overrides", str, "hf_overrides: must be a dict of fields of config.json; no code is taken."),
        ("generation_config", 3, "generation_config=3: is auto, vllm or a folder that has generation_config.json."),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_what_is_meant(argument: str, value: object, refusal: str) -> None:
    with pytest.raises(QuireError) as refused:
        llm_settings(**{argument: value})
    assert str(refused.value).startswith(refusal)


@pytest.mark.parametrize("row", [row for row in FIELDS if row.secret], ids=lambda row: row.name)
def test_a_secret_is_not_shown(row: Setting) -> None:
    wrong: Any = ("se cret",) if row.kind is Kind.TEXTS else ["se cret"]
    with pytest.raises(QuireError) as refusal:
        row.config(**{row.field: wrong})
    assert "cret" not in str(refusal.value)
    assert "secret" not in repr(row.config(**{row.field: ("secret",) if row.kind is Kind.TEXTS else "secret"}))


def test_the_signature_of_llm_has_every_argument_and_its_default() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "model" and parameters["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {*parameters} - {"vllm"} == {row.name for row in at("LLM")}
    assert parameters["block_size"].default == 8 and parameters["swap_space"].default is None
    assert parameters["max_num_seqs"].annotation == int | None
    for row in at("LLM"):
        assert f"\n        {row.name}: {row.help.split()[0]}" in (LLM.__doc__ or "")


def test_the_types_of_arguments_are_those_of_the_signature() -> None:
    hints = typing.get_type_hints(LLMArguments)
    taken = {one.name for one in NAMES if "LLM" in one.doors and one.status != "served" and one.values}
    assert set(hints) == ({row.name for row in at("LLM")} - {"model"}) | taken
    parameters = inspect.signature(LLM).parameters
    for row in at("LLM"):
        if row.name != "model" and row.kind is not Kind.OBJECT:
            assert hints[row.name] == parameters[row.name].annotation, row.name


@pytest.mark.parametrize("arguments", [EngineArgs, AsyncEngineArgs])
def test_engine_args_have_every_argument(arguments: type[EngineArgs]) -> None:
    fields = [field.name for field in dataclasses.fields(arguments)]
    assert fields[0] == "model" and {row.name for row in at("EngineArgs")} <= set(fields)
    assert arguments("a").model == "a" and arguments(block_size=16).create_engine_config().cache.block_size == 16


def test_a_name_that_nobody_has_comes_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown argument: blok_size; did you mean block_size"):
        llm_settings(blok_size=8)
    with pytest.raises(TypeError, match="unknown argument: blok_size"):
        engine_config(blok_size=8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (write.TYPES, lambda old: write.typed_arguments()),
        (write.SETTINGS_PAGE, write.settings_page),
        (write.VLLM_PAGE, write.vllm_page),
    ],
    ids=["types", "settings", "vllm"],
)
def test_what_is_made_of_the_table_is_fresh(path: Path, text: Any) -> None:
    old = path.read_text(encoding="utf-8")
    assert text(old) == old, f"{path.name} is stale: run python -m quire.config.write"
