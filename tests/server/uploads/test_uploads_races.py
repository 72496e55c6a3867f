"""Adapters that come and go while somebody asks for them: what is told then is no id and no path of the server's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.demo import adapter_path
from quire.errors import UnknownAdapterError
from tests.server.api_answers import error_of
from tests.server.api_server import LocalServer
from tests.server.uploads.helpers import ADAPTERS, CHAT, WHO, files_of, upload

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[LocalServer]:
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(str(root),), lora_resolver=False) as server:
        yield server


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_goes_before_its_request_begins_is_unknown(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """It is there when the request is looked at, is unloaded, and is there again when the error is made."""
    lora = served.engine.llm_engine.lora
    hold, tried = lora.hold, []

    def hold_late(*given: Any) -> Any:
        lora.unload("mine")
        tried.append(given)
        try:
            return hold(*given)
        finally:
            lora.load("mine", str(adapter_path("french")))

    asked = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, {"messages": WHO})
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    lora.load("mine", str(adapter_path("french")))
    with served.http() as http:
        body = {"model": "mine", most: 4, **asked, "stream": stream}
        assert http.post(path, json={**body, "stream": False}).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(lora, "hold", hold_late)
            answer = http.post(path, json=body)
        unknown = http.post(path, json={**body, "model": "other"})
        assert tried and (answer.status_code, unknown.status_code) == (404, 404), answer.text
        if path != "/v1/messages":
            assert error_of(answer)["code"] == "model_not_found" and error_of(answer)["param"] == "model"
        told, known = ({**one.json(), "request_id": ""} for one in (answer, unknown))
        assert str(told) == str(known).replace("other", "mine")
        lora.unload("mine")
    served.until_idle()


def test_an_adapter_that_goes_before_it_is_unloaded_is_unknown(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unload(name: str, seconds: float) -> None:
        raise UnknownAdapterError(f"no adapter {name!r} is loaded (loaded: others).", name)

    served.engine.llm_engine.lora.load("mine", str(adapter_path("french")))
    with served.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "unload_lora_adapter", unload)
            answer = http.post(UNLOAD, json={"lora_name": "mine"})
        assert answer.status_code == 404 and "others" not in answer.text
        assert (error_of(answer)["code"], error_of(answer)["param"]) == ("model_not_found", "lora_name")
        assert http.post(UNLOAD, json={"lora_name": "mine"}).status_code == 200


def test_a_load_that_an_upload_overtakes_tells_no_path(
    served: LocalServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = served.app.state.context.served._places  # private: a race is made here
    find = places.folder  # in its thread: between the look at the name and the loading

    def find_late(path: str) -> Path:
        with served.http() as http:
            upload(http, "mine", files_of("french"))
        return find(path)

    with served.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(places, "folder", find_late)
            answer = http.post(LOAD, json={"lora_name": "mine", "lora_path": str(root / "good")})
        assert answer.status_code == 422 and error_of(answer)["code"] == "adapter_refused"
        assert "loaded already" in answer.text and "quire-adapters-" not in answer.text, answer.text
        assert http.delete(f"{ADAPTERS}/mine").status_code == 200


def test_a_folder_that_goes_while_it_is_loaded(
    served: LocalServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client knows this path: it named it."""
    shutil.copytree(root / "good", root / "fleeting")
    places = served.app.state.context.served._places  # private: a race is made here
    find = places.folder

    def find_and_lose(path: str) -> Path:
        found: Path = find(path)
        shutil.rmtree(found)
        return found

    with served.http() as http:
        monkeypatch.setattr(places, "folder", find_and_lose)
        answer = http.post(LOAD, json={"lora_name": "mine", "lora_path": str(root / "fleeting")})
    assert answer.status_code == 422 and "quire-adapters-" not in answer.text, answer.text
