"""The options of `quire serve`: flags, variables and a file."""

from __future__ import annotations

import gc
import os
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.config import CacheConfig, MediaConfig, ServerConfig
from quire.config.arguments import engine_config
from quire.config.settings import at
from quire.errors import QuireError
from quire.server import launch as serve

pytestmark = pytest.mark.usefixtures("one_thread")


class Served:
    """`quire serve`, up to the point where it would serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self._tasks: list[serve.Task] = []
        monkeypatch.setattr(serve, "serve", self._take)
        for name in [name for name in os.environ if name.startswith(("QUIRE_", "VLLM_"))]:
            monkeypatch.delenv(name)

    def _take(self, task: serve.Task) -> int:
        self._tasks.append(task)
        return 0

    def run(self, *args: str, yaml: str | None = None, **environment: str) -> Result:
        if yaml is not None:
            file = self._folder / "quire.yaml"
            file.write_text(yaml, encoding="utf-8")
            args = ("--config", str(file), *args)
        return CliRunner().invoke(app, ["serve", *args], env={"COLUMNS": "500", **environment})

    def __call__(self, *args: str, yaml: str | None = None, **environment: str) -> serve.Task:
        result = self.run(*args, yaml=yaml, **environment)
        assert result.exit_code == 0, result.output
        return self._tasks.pop()

    def complaint(self, *args: str, yaml: str | None = None, **environment: str) -> str:
        result = self.run(*args, yaml=yaml, **environment)
        assert result.exit_code == 2 and not self._tasks, result.output
        return result.output


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Served:
    return Served(monkeypatch, tmp_path)


def test_flags_come_before_variables_and_variables_before_the_file(served: Served) -> None:
    yaml = "port: 2\nmax-num-seqs: 2\nhost: '2'\n"
    task = served("--port", "4", yaml=yaml, QUIRE_PORT="3", QUIRE_MAX_NUM_SEQS="3")
    assert (task.settings["port"], task.settings["max_num_seqs"], task.settings["host"]) == (4, 3, "2")
    assert "port" not in served().settings


def test_every_form_of_value_in_a_file(served: Served) -> None:
    task = served(
        yaml="""
model: some/model
port: 5
media_fetch_timeout: 2.5
enable-prefix-caching: false
enable_lora: true
limit-mm-per-prompt: {image: 3}
served-model-name: [one, two]
api-key: alone
lora-modules:
  - a=x
  - {name: b, path: y}
log-format: json
disable-access-log: true
override-generation-config: {temperature: 0.5}
"""
    )
    assert (task.settings["model"], task.settings["port"], task.settings["media_fetch_timeout"]) == (
        "some/model",
        5,
        2.5,
    )
    assert (task.settings["enable_prefix_caching"], task.settings["enable_lora"]) == (False, True)
    assert task.settings["limit_mm_per_prompt"] == {"image": 3}
    assert (task.settings["served_model_name"], task.settings["api_key"]) == (["one", "two"], ["alone"])
    assert [serve.Module.parse(text) for text in task.settings["lora_modules"]] == [
        serve.Module("a", "x"),
        serve.Module("b", "y"),
    ]
    assert (task.settings["log_format"], task.settings["disable_access_log"]) == ("json", True)
    assert task.settings["override_generation_config"] == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("yaml", "word"),
    [
        ("prot: 5", "prot"),
        ("words: some/model", "words"),
        ("config: other.yaml", "config"),
        ("help: true", "help"),
        ("- port", "names and values"),
        ("port: [", "cannot be read"),
        ("port: x", "--port"),
        ("host: [a, b]", "host"),
    ],
)
def test_a_file_that_is_wrong(served: Served, yaml: str, word: str) -> None:
    assert word in served.complaint(yaml=yaml)


def test_a_file_that_is_not_there(served: Served) -> None:
    assert "nothing.yaml" in served.complaint("--config", "nothing.yaml")


def test_the_file_may_be_named_by_a_variable(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "named.yaml"
    file.write_text("port: 7", encoding="utf-8")
    assert served(QUIRE_CONFIG=str(file)).settings["port"] == 7


def test_the_model_by_its_place_or_by_its_flag(served: Served) -> None:
    assert "model" not in served().settings
    assert served("A").settings["model"] == served("--model", "A").settings["model"] == "A"
    assert served("A", "--model", "A").settings["model"] == "A"
    assert "give one of them" in served.complaint("A", "--model", "B")
    # Both are flags, which come first.
    assert served("A", yaml="model: B").settings["model"] == "A"
    assert served("A", QUIRE_MODEL="B").settings["model"] == "A"
    assert served(yaml="model: B", QUIRE_MODEL="C").settings["model"] == "C"


@pytest.mark.parametrize(
    "args",
    [
        ("--lora-modules", "a=x", "b=y", "MODEL"),
        ("--lora-modules", "a=x", "b=y", "--port", "1", "MODEL"),
        ("MODEL", "--lora-modules", "a=x", "b=y"),
        ("--lora-modules", "a=x", "--lora-modules", "b=y", "MODEL"),
        ("--lora-modules", '{"name": "a", "path": "x"}', '{"name": "b", "path": "y"}', "MODEL"),
        ("--lora-modules", '{"name": "a", "path": "x"}', "b=y", "MODEL"),
    ],
)
def test_lora_modules_as_vllm_takes_them(served: Served, args: tuple[str, ...]) -> None:
    task = served(*args)
    assert task.settings["model"] == "MODEL"
    assert [serve.Module.parse(text) for text in task.settings["lora_modules"]] == [
        serve.Module("a", "x"),
        serve.Module("b", "y"),
    ]


def test_a_module_and_what_it_belongs_to() -> None:
    text = '{"name": "a", "path": "x", "base_model_name": "m"}'
    assert serve.Module.parse(text) == serve.Module("a", "x", "m")
    assert serve.Module.parse("a=x=y") == serve.Module("a", "x=y")
    for wrong in ("a", "a=", "=x", "{", '{"name": "a"}', '{"name": "a", "path": "x", "rank": 5}', "{}"):
        with pytest.raises(quire.QuireError, match="--lora-modules"):
            serve.Module.parse(wrong)


def test_lists_in_variables_and_as_json(served: Served) -> None:
    assert served(QUIRE_API_KEY="one two").settings["api_key"] == ["one", "two"]
    assert served("--api-key", '["one", "two"]', "--api-key", "three").settings["api_key"] == ["one", "two", "three"]
    assert served(QUIRE_LORA_MODULES="a=x b=y").settings["lora_modules"] == ["a=x", "b=y"]
    said = served.complaint("--api-key", "[secret")
    assert "--api-key" in said and "secret" not in said


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


def test_underscores_for_hyphens(served: Served) -> None:
    task = served("--max_num_seqs", "3", "--no_enable_prefix_caching", "--max_model_len=64")
    assert (task.settings["max_num_seqs"], task.settings["enable_prefix_caching"]) == (3, False)
    assert task.settings["max_model_len"] == 64
    # Values stay as they are, also those that look like options.
    assert served("--api_key", "--a_b").settings["api_key"] == ["--a_b"]


@pytest.mark.parametrize(
    "args",
    [
        ("MODEL", "--served-model-name", "a", "b", "c"),
        ("--served-model-name", "a", "b", "c", "--port", "1", "MODEL"),
        ("--served-model-name", "a", "b", "c", "--model", "MODEL"),
        ("--served_model_name", "a", "b", "--served-model-name=c", "--", "MODEL"),
    ],
)
def test_several_names_after_one_option(served: Served, args: tuple[str, ...]) -> None:
    task = served(*args)
    assert (task.settings["model"], task.settings["served_model_name"]) == ("MODEL", ["a", "b", "c"])


def test_the_model_behind_one_value(served: Served) -> None:
    task = served("--served-model-name", "a", "MODEL")
    assert (task.settings["model"], task.settings["served_model_name"]) == ("MODEL", ["a"])
    assert served("--served-model-name", "a").settings["served_model_name"] == ["a"]


def test_what_could_be_a_name_or_the_model(served: Served) -> None:
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", "c")
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", yaml="model: M")
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", QUIRE_MODEL="M")
    assert "put the model first" in served.complaint("--served-model-name", "a", "b", "--api-key", "c", "d")


def test_switches_with_a_value(served: Served) -> None:
    assert served("--enable-prefix-caching=False").settings["enable_prefix_caching"] is False
    assert served("--enable-lora", "true", "MODEL").settings == {"enable_lora": True, "model": "MODEL"}
    assert served("--no-enable-lora=false").settings["enable_lora"] is True
    assert served("--disable-access-log=true").settings["disable_access_log"] is True
    assert served("--disable-uvicorn-access-log").settings["disable_access_log"] is True
    assert "disable_access_log" not in served("--disable-access-log=false").settings
    assert "neither true nor false" in served.complaint("--enable-lora=perhaps")


def test_limits_and_objects_in_vllms_forms(served: Served) -> None:
    for args in (("--limit-mm-per-prompt", "image=4"), ("--limit-mm-per-prompt", '{"image": 4}'),
                 ("--limit_mm_per_prompt.image", "4"), ("--limit-mm-per-prompt.image=4",)):  # fmt: skip
        assert served(*args).settings["limit_mm_per_prompt"] == {"image": 4}
    assert served(yaml="limit-mm-per-prompt: image=4").settings["limit_mm_per_prompt"] == {"image": 4}
    task = served("--mm-processor-kwargs.size.shortest_edge", "32", "--mm-processor-kwargs.do_resize", "true")
    assert task.settings["mm_processor_kwargs"] == {"size": {"shortest_edge": 32}, "do_resize": True}
    assert "give one of them" in served.complaint(
        "--limit-mm-per-prompt", "image=3", "--limit-mm-per-prompt.image", "4"
    )
    assert "image=3,image=4" in served.complaint("--limit-mm-per-prompt", "image=3,image=4")
    assert "image=few" in served.complaint("--limit-mm-per-prompt", "image=few")


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
    assert shown["limit_mm_per_prompt"] == str(MediaConfig().max_images)
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
    engine = SimpleNamespace(failed=False, stuck=False)
    gc.unfreeze()
    try:
        serve._run(SimpleNamespace(), engine, ServerConfig())  # type: ignore[arg-type]
        assert frozen[0] > 50_000
    finally:
        gc.unfreeze()


BOMB = "hf-overrides:\n  a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  {here}: &{here} [{', '.join([f'*{before}'] * 9)}]\n" for before, here in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("port: 1\nport: 2\n", "'port' is there twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "'max_num_seqs' is there twice"),
        ("hf-overrides: {a: {b: 1, b: 2}}\n", "'b' is there twice"),
        ("api-key: [~]\n", "an entry without a value"),
        ("hf-overrides: &x {a: *x}\n", "lies in itself"),
        (BOMB, "holds too much"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("hf-overrides: " + "{a: " * 200 + "1" + "}" * 200, "nested too deeply"),
        ("max-queue: " + "9" * 5000, "cannot be read"),
    ],
    ids=["twice", "two names", "inner", "null", "circle", "bomb", "lists", "objects", "digits"],
)
def test_a_file_that_says_no_one_thing_is_refused(served: Served, yaml: str, message: str) -> None:
    assert message in " ".join(served.complaint(yaml=yaml).split())


def test_a_file_may_use_anchors(served: Served) -> None:
    task = served(yaml="lora-root: &roots [/a, /b]\nhf-overrides: {x: *roots, <<: {y: 1}}\n")
    assert task.settings["lora_root"] == ["/a", "/b"] and task.settings["hf_overrides"] == {"x": ["/a", "/b"], "y": 1}
