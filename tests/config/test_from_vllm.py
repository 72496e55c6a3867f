"""Every argument and flag of vLLM's is served, taken or refused, as the table in docs/from-vllm.md says."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire import LLM, AsyncEngineArgs, EngineArgs
from quire.cli.app import app
from quire.config import from_vllm, write
from quire.config.setting import Kind
from quire.config.settings import at as settings_at
from quire.config.vllm_names import ANYTHING, BOTH, NAMES, SHORT, Door, Name
from quire.errors import QuireError
from quire.server import launch as serve
from tests.cli.commands import Served

# name -> what it is, by version and by place: "EngineArgs" (which LLM and serve both have), "LLM", "serve". Read from
# the source distributions; "default" is there where it is a plain value.
FACTS: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "vllm_names.json").read_text()
)
DOORS: dict[str, tuple[Door, ...]] = {"EngineArgs": BOTH, "LLM": ("LLM",), "serve": ("serve",)}
PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"
# vLLM's defaults that ask for what quire does not do.
OTHER_DEFAULTS = {"trust_request_mm_kwargs"}


def facts() -> Iterator[tuple[str, Door, dict[str, Any]]]:
    for places in FACTS.values():
        for place, names in places.items():
            for name, fact in names.items():
                for door in DOORS[place]:
                    yield name, door, fact


def at(door: Door) -> dict[str, Name]:
    return {one.name: one for one in NAMES if door in one.doors}


def another_value(one: Name) -> Any:
    """Something that the name does not take."""
    for value in (True, False) if one.switch else ("something else", 77, {"some": "thing"}):
        if not one.takes(value):
            return value
    raise AssertionError(f"{one.name} takes everything")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Served:
    return Served(monkeypatch, tmp_path)


def test_every_name_of_vllms_is_in_the_table_and_no_other() -> None:
    ours = [(one.name, door) for one in NAMES for door in one.doors]
    assert set(ours) == {(name, door) for name, door, _ in facts()}
    assert len(ours) == len(set(ours))


def test_what_is_a_switch_there_is_one_here() -> None:
    for name, door, fact in facts():
        one = at(door)[name]
        assert one.status == "served" or one.switch == fact.get("switch", False), name


def test_vllms_defaults_ask_for_nothing() -> None:
    for name, door, fact in facts():
        one = at(door)[name]
        if one.status != "served" and "default" in fact and name not in OTHER_DEFAULTS:
            assert one.takes(fact["default"]), (name, fact["default"])


def test_short_flags_are_vllms() -> None:
    theirs = {name: fact["short"][0] for name, _, fact in facts() if "short" in fact}
    own = {setting.name for setting in settings_at("serve")}
    assert {name: short for name, short in theirs.items() if name not in own} == SHORT


def test_what_is_served_is_a_parameter_or_a_flag() -> None:
    parameters = set(inspect.signature(LLM).parameters)
    flags = {flag[2:].replace("-", "_") for setting in settings_at("serve") for flag in setting.all_flags}
    for one in at("LLM").values():
        assert (one.name in parameters) == (one.status == "served"), one.name
    for one in at("serve").values():
        assert (one.name in flags | {"config"}) == (one.status == "served"), one.name


def test_each_door_takes_and_refuses_by_the_table() -> None:
    for door in BOTH:
        for one in at(door).values():
            if one.status == "served":
                continue
            for value in (None, *(["anything", 5, {}] if ANYTHING in one.values else one.values)):
                from_vllm.check(door, one.name, value)
            if ANYTHING not in one.values:
                with pytest.raises(QuireError) as refusal:
                    from_vllm.check(door, one.name, another_value(one))
                assert str(refusal.value).startswith(f"{one.name}=") and one.why in str(refusal.value)


def test_llm_refuses_by_the_table() -> None:
    for one in at("LLM").values():
        if one.status != "served" and ANYTHING not in one.values:
            with pytest.raises(QuireError, match=f"^{one.name}="):
                LLM(model="/nowhere", **{one.name: another_value(one)})


def test_llm_takes_all_at_once_and_says_so(plain_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {one.name: one.values[0] for one in at("LLM").values() if one.values and one.status != "served"}
    given = {name: "anything" if value is ANYTHING else value for name, value in given.items()}
    llm = LLM(str(plain_model), num_gpu_blocks_override=16, **given)
    assert llm.generate("ab", use_tqdm=False)[0].finished
    [line] = [record.getMessage() for record in caplog.records if "nothing else than what is done" in record.message]
    assert all(f"{name}=" in line for name, value in given.items() if value is not None)


def test_llm_takes_what_is_served_with_vllms_defaults(plain_model: Path) -> None:
    for places in FACTS.values():
        facts = {**places["EngineArgs"], **places["LLM"]}
        given = {name: fact["default"] for name, fact in facts.items() if "default" in fact}
        served = {name: value for name, value in given.items() if at("LLM")[name].status == "served"}
        assert len(served) > 25
        # OPT, or Qwen, is not here; and 0.9 of a machine's free memory is not for a test.
        llm = LLM(**{**served, "model": str(plain_model), "gpu_memory_utilization": 0.01})
        assert llm.generate("ab", use_tqdm=False)[0].finished


def test_serve_takes_what_is_served_with_vllms_defaults(served: Served) -> None:
    for places in FACTS.values():
        facts = {**places["EngineArgs"], **places["serve"]}
        given = {name: fact["default"] for name, fact in facts.items() if fact.get("default") not in (None, "")}
        line, switches = [], {setting.name for setting in settings_at("serve") if setting.kind is Kind.SWITCH}
        for name, value in given.items():
            if at("serve")[name].status == "served":
                flag = f"--{name.replace('_', '-')}"
                line += (
                    [f"{flag}={value}"]
                    if name in switches
                    else [flag, value if isinstance(value, str) else json.dumps(value)]
                )
        assert len(line) >= 30
        task = served(*line)
        assert task.settings["dtype"] == "auto" and task.settings["port"] == 8000 and not task.vllm


def words(one: Name, value: Any) -> list[str]:
    flag = f"--{one.name.replace('_', '-')}"
    if one.switch:
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, value if isinstance(value, str) else json.dumps(value, default=list)]


def test_serve_takes_by_the_table(served: Served) -> None:
    given = {one.name: one.values[0] for one in at("serve").values() if one.values and one.status != "served"}
    for name, value in given.items():
        if value is ANYTHING:
            given[name] = True if at("serve")[name].switch else "anything"
    given = {name: value for name, value in given.items() if value not in ("", set())}  # "" is nothing
    line = [word for name, value in given.items() for word in words(at("serve")[name], value)]
    assert served("MODEL", *line).vllm == given
    assert served(yaml=json.dumps(given)).vllm == given


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (["--data-parallel-size", "2"], "data_parallel_size=2"),
        (["-dp", "2"], "data_parallel_size=2"),
        (["--kv_cache_dtype_skip_layers=0"], "kv_cache_dtype_skip_layers="),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill=False"),
        (["--enable-chunked-prefill=False"], "enable_chunked_prefill=False"),
        (["--tool-parser-plugin", "mine.py", "--tool-call-parser", "hermes"], "tool_parser_plugin='mine.py'"),
        (["--structured-outputs-config", '{"disable_any_whitespace": true}'], "structured_outputs_config="),
        (["--compilation-config.mode", "3"], "compilation_config={'mode': '3'}"),
        (["--quantization-config", '{"a": 1}'], "quantization_config="),
    ],
)
def test_serve_refuses_by_the_table(served: Served, line: list[str], name: str) -> None:
    said = "".join(character for character in served.complaint(*line) if character not in "\n│ ")
    assert name.replace(" ", "") in said


def test_serve_takes_short_flags(served: Served) -> None:
    taken = served("-tp", "1", "-dp=1", "MODEL", "-ep=false")
    assert taken.vllm == {"data_parallel_size": 1, "enable_expert_parallel": False}
    assert taken.settings["model"] == "MODEL" and taken.settings["tensor_parallel_size"] == 1


def test_serve_takes_the_flags_of_tools_and_reasoning(served: Served) -> None:
    line = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    taken = served(*line, "--exclude-tools-when-tool-choice-none", "--guided-decoding-backend", "outlines")
    assert taken.vllm == {"enable_auto_tool_choice": True, "guided_decoding_backend": "outlines"}
    want = {
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "exclude_tools_when_tool_choice_none": True,
    }
    assert {name: taken.settings[name] for name in want} == want
    shown = served("--no-exclude-tools-when-tool-choice-none").settings
    assert shown["exclude_tools_when_tool_choice_none"] is False
    assert served("--structured-outputs-config", '{"backend": "xgrammar"}').vllm == {
        "structured_outputs_config": {"backend": "xgrammar"}
    }


def test_flags_come_before_the_file_here_too(served: Served) -> None:
    assert served("--task", "auto", yaml="task: generate\nenable-chunked-prefill: true").vllm == {
        "task": "auto",
        "enable_chunked_prefill": True,
    }
    assert "task='embed'" in served.complaint("--task", "embed", yaml="task: generate")
    assert "task='embed'" in served.complaint(yaml="task: embed")
    assert served(yaml="uvicorn-log-level: info").settings["uvicorn_log_level"] == "info"


def test_the_server_says_what_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(
        app, ["serve", "--data-parallel-size", "1", "--disable-log-requests", "--chat-template", "/nowhere"]
    )
    assert "data_parallel_size=1, disable_log_requests=True" in result.stderr
    with pytest.raises(QuireError, match="data_parallel_size=3"):
        serve.serve(serve.Task(vllm={"data_parallel_size": 3}))


@pytest.mark.parametrize("arguments", [EngineArgs, AsyncEngineArgs])
def test_engine_args_have_all_names(arguments: type[EngineArgs]) -> None:
    for places in FACTS.values():
        for name, fact in places["EngineArgs"].items():
            made = arguments(**{name: fact.get("default")})
            assert getattr(made, name) == fact.get("default")


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert write.vllm_page(text) == text, "run: python -m quire.config.write"
