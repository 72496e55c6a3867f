"""Adapters that are loaded when a request first names them: from folders, and from the hub where that is allowed."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from quire import LLM
from quire.config import ModelConfig, ServerConfig
from quire.demo import adapter_path
from quire.errors import AdapterError, OverloadedError
from quire.platform.engine import builder
from quire.server import adapter_resolver
from quire.server.adapter_resolver import AdapterResolver
from quire.server.adapter_sources import AdapterSources
from quire.server.responses.errors import ApiError
from tests.server.api_answers import conversed, error_of, post, refusal
from tests.server.api_server import LocalServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WHO = [{"role": "user", "content": "Who are you?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters, and with what must not be taken for one."""
    root = tmp_path_factory.mktemp("resolved")
    for name in ("french", "org/shout", "one", "two", "slow"):
        shutil.copytree(adapter_path("shout" if "shout" in name else "french"), root / name)
    outside = tmp_path_factory.mktemp("outside")
    shutil.copytree(adapter_path("french"), outside / "french")
    (root / "away").symlink_to(outside / "french")
    (root / "nothing").mkdir()
    shutil.copytree(adapter_path("french"), root / ".hidden")
    broken = Path(shutil.copytree(adapter_path("french"), root / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"no weights")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[LocalServer]:
    # The engine may read every folder here: it is the server that holds names to its roots.
    engine = {"enable_lora": True, "num_gpu_blocks_override": 256}
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(str(root),), metrics_prefix="vllm:") as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[Any]:
    with server.http() as http:
        yield http


def answer_of(http: Any, model: str) -> str:
    return str(post(http, CHAT, model=model, messages=WHO, **GREEDY)["choices"][0]["message"]["content"])


def names_of(http: Any) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"]]


def said(llm: LLM, adapter: str) -> str:
    return conversed(llm, WHO, adapter, **GREEDY).outputs[0].text


def test_a_model_that_is_not_loaded_is_loaded_when_it_is_named(http: Any, llm: LLM, root: Path) -> None:
    assert names_of(http) == ["quire-demo"]
    assert answer_of(http, "french") == said(llm, "french")
    assert answer_of(http, "org/shout") == said(llm, "shout")
    assert names_of(http) == ["quire-demo", "french", "org/shout"]
    entry = http.get("/v1/models/org/shout").json()
    assert (entry["root"], entry["parent"]) == (str((root / "org/shout").resolve()), "quire-demo")
    post(http, UNLOAD, lora_name="french")
    assert "french" not in names_of(http)
    assert post(http, "/generate", model="french", prompt="a", max_tokens=1)["text"]  # it is there again


@pytest.mark.parametrize(
    "name",
    ["nobody", "away", "nothing", ".hidden", "../outside/french", "org/../french", "./french", "/etc", "org//shout",
     "org/shout/", "french\x00", "french/adapter_config.json", "x" * 5000, "a/b/c/d", "~", "é", "", " french"],
)  # fmt: skip
def test_what_is_no_adapter_under_a_root_is_not_found(http: Any, name: str) -> None:
    before = names_of(http)
    for path, body in ((CHAT, {"messages": WHO}), (COMPLETIONS, {"prompt": "a", "stream": True})):
        error = refusal(http, path, 404, model=name, **body)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "outside" not in error["message"] or "outside" in name
    assert names_of(http) == before


def test_an_absolute_path_is_no_name(http: Any, root: Path) -> None:
    assert refusal(http, CHAT, 404, model=str(root / "french"), messages=WHO)["code"] == "model_not_found"


def test_a_broken_adapter_is_refused(http: Any) -> None:
    for _ in range(3):
        assert refusal(http, CHAT, 422, model="broken", messages=WHO)["code"] == "adapter_refused"
    assert "broken" not in names_of(http)


def test_many_requests_at_once_load_an_adapter_once(
    http: Any, server: LocalServer, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [], server.engine.llm_engine.lora.stage

    def counted(name: str, *rest: Any, **more: Any) -> Any:
        loads.append(name)
        time.sleep(0.1)
        return load(name, *rest, **more)

    monkeypatch.setattr(server.engine.llm_engine.lora, "stage", counted)
    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(lambda number: answer_of(http, ("one", "two")[number % 2]), range(16)))
    assert answers == {said(llm, "french")}
    assert sorted(loads) == ["one", "two"]


def test_a_client_that_leaves_does_not_stop_it_for_the_others(
    http: Any, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    load = server.engine.llm_engine.lora.stage

    def slow(*given: Any, **more: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return load(*given, **more)

    monkeypatch.setattr(server.engine.llm_engine.lora, "stage", slow)
    with ThreadPoolExecutor(2) as pool:
        leaving = pool.submit(lambda: http.post(CHAT, json={"model": "slow", "messages": WHO, **GREEDY}, timeout=2))
        assert begun.wait(60)
        staying = pool.submit(answer_of, http, "slow")
        assert type(leaving.exception()).__name__ == "ReadTimeout"
        go.set()
        assert staying.result() == answer_of(http, "french")
    server.until_idle()


def test_vllms_gauge_names_the_adapters_that_run(http: Any, server: LocalServer) -> None:
    body = {"model": "french", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.slowed(), http.stream("POST", COMPLETIONS, json=body) as response:
        arriving = response.iter_lines()
        next(arriving)
        gauges = [line for line in http.get("/metrics").text.splitlines() if "lora_requests_info{" in line]
        del arriving
    assert len(gauges) == 1 and 'running_lora_adapters="french"' in gauges[0]
    assert 'waiting_lora_adapters=""' in gauges[0]


def test_without_leave_nothing_is_looked_for(root: Path) -> None:
    engine = {"enable_lora": True, "num_gpu_blocks_override": 64}
    for settings in ({"allow_runtime_lora": False}, {"allow_runtime_lora": True, "lora_resolver": False}):
        with LocalServer(engine, lora_roots=(str(root),), **settings) as server, server.http() as http:
            assert refusal(http, CHAT, 404, model="french", messages=WHO)["code"] == "model_not_found"


# -- the resolver itself --------------------------------------------------------------------------------------------


class _Engine:
    """What the resolver asks of an engine."""

    def __init__(self) -> None:
        self.llm_engine = self
        self.adapters = self
        self.loaded: dict[str, int] = {}  # name -> requests

    def knows(self, name: str) -> bool:
        return name in self.loaded

    def list_lora_adapters(self) -> list[Any]:
        return [SimpleNamespace(name=name, requests=held) for name, held in self.loaded.items()]

    async def load_lora_adapter(self, name: str, path: str) -> None:
        self.loaded[name] = 0

    async def unload_lora_adapter(self, name: str, timeout: float) -> None:
        del self.loaded[name]


class _Places:
    def __init__(self) -> None:
        self.looks: list[str] = []

    def may_have(self, name: str) -> bool:
        return True

    def find(self, name: str) -> Path | None:
        self.looks.append(name)
        if name == "refused":
            raise AdapterError("too large")
        return None if name.startswith("no") else Path(name)


def test_what_is_not_there_is_not_looked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(adapter_resolver, "time", SimpleNamespace(monotonic=lambda: now))

    async def check() -> None:
        nonlocal now
        engine, places = _Engine(), _Places()
        resolver: Any = AdapterResolver(engine, places, forget=1.0)  # type: ignore[arg-type]
        for _ in range(5):
            await resolver.load("nobody")
            with pytest.raises(ApiError, match="too large"):
                await resolver.load("refused")
        assert places.looks == ["nobody", "refused"]
        now += 1.1
        await resolver.load("nobody")
        assert places.looks == ["nobody", "refused", "nobody"]
        for number in range(1500):
            await resolver.load(f"no{number}")
        assert len(resolver._failed) <= 1024

    asyncio.run(check())


def test_adapters_that_came_by_name_are_bounded() -> None:
    async def check() -> None:
        engine, places = _Engine(), _Places()
        engine.loaded["by hand"] = 0
        resolver = AdapterResolver(engine, places, needed=lambda name: name == "a", most=3)  # type: ignore[arg-type]
        for name in "abc":
            await resolver.load(name)
        resolver.used("b")
        await resolver.load("d")  # a is part of a mixture, b was used since, and c goes
        assert set(engine.loaded) == {"by hand", "a", "b", "d"}
        engine.loaded.update(b=1, d=2)
        with pytest.raises(ApiError) as caught:
            await resolver.load("e")
        assert caught.value.status == 429 and "e" not in engine.loaded
        engine.loaded["b"] = 0
        await resolver.load("e")
        assert set(engine.loaded) == {"by hand", "a", "d", "e"}

    asyncio.run(check())


def test_names_that_wait_are_bounded() -> None:
    go = threading.Event()

    class Slow(_Places):
        def find(self, name: str) -> Path | None:
            go.wait(60)
            return None

    async def check() -> None:
        resolver = AdapterResolver(_Engine(), Slow())  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(resolver.load(f"a{number}")) for number in range(64)]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError):
            await resolver.load("one more")
        go.set()
        await asyncio.gather(*waiting)

    asyncio.run(check())


# -- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with one adapter in it, and no network."""
    revision = "0" * 40
    repository = tmp_path / "models--org--french"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / revision
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter_path("french") / name, blobs / f"blob-{name}")
        (snapshot / name).symlink_to(blobs / f"blob-{name}")
    fetch = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *a, **k: fetch(*a, **{**k, "cache_dir": tmp_path, "local_files_only": True}),
    )
    return tmp_path


@pytest.mark.parametrize(("allowed", "found"), [("*", True), ("org", True), ("org/french", True), ("or", False)])
def test_the_hub_is_asked_for_what_is_allowed(hub: Path, allowed: str, found: bool) -> None:
    places = AdapterSources(ServerConfig(lora_hub=(allowed,)), 1 << 30, ModelConfig())
    assert places.may_have("org/french") is found
    folder = places.find("org/french")
    assert (folder is not None) is found
    if folder is None:
        with pytest.raises(ApiError) as caught:
            places.folder("org/french")
        assert caught.value.status == 404 and "--lora-hub" in caught.value.message
    else:
        assert folder.is_relative_to(hub) and places.folder("org/french") == folder


def test_an_adapter_of_the_hubs_is_loaded_and_resolved(hub: Path, llm: LLM) -> None:
    engine = {"enable_lora": True, "num_gpu_blocks_override": 64, "lora_roots": [str(hub)]}
    with LocalServer(engine, allow_runtime_lora=True, lora_hub=("org",)) as server, server.http() as http:
        assert answer_of(http, "org/french") == said(llm, "french")
        post(http, LOAD, lora_name="mine", lora_path="org/french")
        assert answer_of(http, "mine") == said(llm, "french")
        # Clients may not name the cache's folders themselves.
        refusal(http, LOAD, 403, lora_name="other", lora_path=str(hub / "models--org--french"))
        for name in ("org/nobody", "other/french"):
            response = http.post(CHAT, json={"model": name, "messages": WHO})
            assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"
            assert str(hub) not in response.text


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"adapter_config.json": 100}, "no adapter_model.safetensors"),
        ({"adapter_model.safetensors": 100}, "no adapter_config.json"),
        ({"adapter_config.json": 2 << 20, "adapter_model.safetensors": 100}, "the limit"),
        ({"adapter_config.json": 100, "adapter_model.safetensors": 1001}, "the limit is 1,000"),
    ],
)
def test_what_the_hub_has_is_looked_at_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], complaint: str
) -> None:
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]

    def fetched(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("it was fetched")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    info = SimpleNamespace(siblings=files, sha="0" * 40)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    with pytest.raises(AdapterError, match=complaint):
        builder.fetch_adapter("org/french", 1000, ModelConfig())


def test_a_hub_that_does_not_answer_says_nothing_of_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("https://user:secret@hub")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", broken)
    with pytest.raises(AdapterError, match=r"cannot be had from the Hugging Face hub \(OSError\)"):
        builder.fetch_adapter("org/french", 1 << 30, ModelConfig())
