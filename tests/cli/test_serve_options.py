"""The options of `quire serve`: flags, variables, and their values."""

from __future__ import annotations

import gc
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.config import CacheConfig, MediaConfig, ServerConfig
from quire.config.arguments import engine_config
from quire.config.settings import at
from quire.errors import QuireError
from quire.server import launch as serve
from tests.cli.commands import Served

pytestmark = pytest.mark.usefixtures("one_thread")


def test_flags_come_before_variables_and_variables_before_the_file(served: Served) -> None:
    yaml = "port: 2\nmax-num-seqs: 2\nhost: '2'\n"
    task = served("--port", "4", yaml=yaml, QUIRE_PORT="3", QUIRE_MAX_NUM_SEQS="3")
    assert (task.settings["port"], task.settings["max_num_seqs"], task.settings["host"]) == (4, 3, "2")
    assert "port" not in served().settings


def test_flags_may_be_taken_back(served: Served) -> None:
    assert served("--no-enable-lora", QUIRE_ENABLE_LORA="1").settings["enable_lora"] is False
    assert served(QUIRE_ALLOW_RUNTIME_LORA="true").settings["allow_runtime_lora"] is True


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--port", "x"), "--port"),
        (("--limit-mm-per-prompt", "[1]"), "--limit-mm-per-prompt"),
        (("--override-generation-config", "{"), "--override-generation-config"),
        (("--log-level", "loud"), "--log-level"),
        (("--log-format", "xml"), "--log-format"),
        (("--no-such-flag",), "--no-such-flag"),
        (("A", "B"), "B"),
    ],
)
def test_a_flag_that_is_wrong(served: Served, args: tuple[str, ...], word: str) -> None:
    assert word in served.complaint(*args)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--hf-overrides", '{"auto_map": {}}'), "auto_map"),
        (("--generation-config", "mine"), "generation_config"),
        (("--lora-modules", "a=/nothing/here"), "/nothing/here"),
        (("--lora-modules", "a"), "--lora-modules"),
        (("--override-generation-config", '{"temperatur": 1}'), "temperatur"),
        (("--override-generation-config", '{"temperature": -1}'), "temperature"),
        (("--chat-template", "/nothing/here.jinja"), "chat_template"),
        (("--ssl-keyfile", "key.pem"), "ssl_certfile"),
        (("--port", "99999"), "99999"),
        (("--unload-timeout", "-1"), "unload_timeout"),
    ],
)
def test_what_cannot_be_served_is_one_line(args: tuple[str, ...], word: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--log-level", "error", *args])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and word in result.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("2.5G", 5 << 29), ("1m", 10**6)]
)
def test_sizes(served: Served, text: str, size: int) -> None:
    assert served("--kv-cache-memory-bytes", text).settings["kv_cache_memory_bytes"] == size
    assert served(yaml=f"kv_cache_memory_bytes: {text}").settings["kv_cache_memory_bytes"] == size


def test_a_size_that_is_none(served: Served) -> None:
    assert engine_config(**served("--max-model-len", "auto").engine).model.max_model_len is None
    assert "--max-model-len" in served.complaint("--max-model-len", "long")
    assert "--max-model-len" in served.complaint("--max-model-len", "1e999k")


def test_variables_of_vllm(served: Served) -> None:
    assert served(VLLM_ALLOW_RUNTIME_LORA_UPDATING="True").settings["allow_runtime_lora"] is True
    assert served(VLLM_ALLOW_RUNTIME_LORA_UPDATING="0").settings["allow_runtime_lora"] is False
    task = served("--no-allow-runtime-lora", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    assert task.settings["allow_runtime_lora"] is False
    assert served(VLLM_API_KEY="secret").settings["api_key"] == ["secret"]
    assert "set and empty" in served.complaint(VLLM_API_KEY=" ")


def test_help_fits_80_columns_and_cuts_no_name(served: Served) -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80 and "…" not in result.output
    for setting in at("serve"):
        assert setting.flag[2:] in result.output, setting.name
    for group in {setting.group for setting in at("serve")}:
        assert f"{group}:" in result.output


def test_help_says_the_defaults_of_the_configuration() -> None:
    shown = {setting.name: setting.shown_default for setting in at("serve")}
    assert (shown["port"], shown["max_num_seqs"], shown["max_request_bytes"]) == ("8000", "64", "32 MiB")
    assert shown["limit_mm_per_prompt"] == " ".join(f"{kind}={most}" for kind, most in MediaConfig().limits.items())
    assert float(shown["swap_space"]) * (1 << 30) == CacheConfig().swap_bytes


def test_the_limit_of_an_image_s_cpu_time(served: Served) -> None:
    assert engine_config(**served("--max-image-seconds", "2.5").engine).media.max_image_seconds == 2.5
    assert engine_config(**served(yaml="max_image_seconds: 30").engine).media.max_image_seconds == 30
    assert engine_config(**served().engine).media.max_image_seconds == MediaConfig().max_image_seconds
    with pytest.raises(QuireError, match=r"max_image_seconds=0\.0"):
        engine_config(**served("--max-image-seconds", "0").engine)
    with pytest.raises(QuireError, match="max_image_seconds=-1"):
        quire.LLM(max_image_seconds=-1)


def test_admin_routes_by_vllm_s_names(served: Served) -> None:
    assert "enable_admin_routes" not in served().settings
    for task in (
        served("--enable-admin-routes"),
        served("--enable-sleep-mode"),
        served(yaml="enable-sleep-mode: true"),
        served(VLLM_SERVER_DEV_MODE="1"),
    ):
        assert task.settings["enable_admin_routes"] is True
    assert served("--no-enable-admin-routes", VLLM_SERVER_DEV_MODE="1").settings["enable_admin_routes"] is False


def test_variables_that_are_no_options_are_known(served: Served) -> None:
    assert "QUIRE_CACHE" not in served.run(QUIRE_CACHE="/tmp/x").output
    assert "passed over: QUIRE_CASH" in served.run(QUIRE_CASH="/tmp/x").output


def test_what_is_loaded_is_no_longer_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """That stops every thread for a third of a second, again and again while requests are served."""
    frozen: list[int] = []

    def served(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(serve.asyncio, "run", served)
    idle = SimpleNamespace(lora=SimpleNamespace(lingers=False))
    engine = SimpleNamespace(step_loop=SimpleNamespace(failed=False, stuck=False), llm_engine=idle)
    gc.unfreeze()
    try:
        serve._run(SimpleNamespace(), engine, ServerConfig())  # type: ignore[arg-type]
        assert frozen[0] > 50_000
    finally:
        gc.unfreeze()
