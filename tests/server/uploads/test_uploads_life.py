"""Adapters over HTTP: uploaded, used, replaced, listed and unloaded."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.demo import adapter_path
from tests.server.api_answers import conversed, error_of
from tests.server.api_server import LocalServer
from tests.server.uploads.helpers import (
    ADAPTERS,
    CHAT,
    MOST,
    WHO,
    files_of,
    form,
    names_of,
    said,
    send,
    stored,
    upload,
    zipped,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def voice(llm: LLM, adapter: str) -> str:
    return conversed(llm, WHO, adapter, temperature=0, max_tokens=24).outputs[0].text


def test_an_adapter_is_uploaded_used_and_unloaded(http: Any, server: LocalServer, llm: LLM) -> None:
    answer = upload(http, "org/mine", files_of("french"), base_model_name="quire-demo")
    assert (answer["status"], answer["name"], answer["ignored_files"]) == ("loaded", "org/mine", [])
    assert said(http, "org/mine") == voice(llm, "french")
    folder = server.app.state.context.served.store().folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in stored(server)][1:] == ["adapter_config.json", "adapter_model.safetensors"]
    gone = http.delete(f"{ADAPTERS}/org/mine").json()
    assert gone == {"status": "unloaded", "name": "org/mine", "freed_bytes": answer["bytes"], "draining": False}
    assert stored(server) == [] and names_of(http) == []
    assert http.post(CHAT, json={"model": "org/mine", "messages": WHO}).status_code == 404
    assert error_of(http.delete(f"{ADAPTERS}/org/mine"))["param"] == "lora_name"


def test_the_list_says_what_there_is(http: Any, server: LocalServer) -> None:
    answer = upload(http, "mine", files_of("french"))
    server.engine.llm_engine.load_lora_adapter("here", str(adapter_path("shout")))
    found = http.get(ADAPTERS).json()
    mine, here = found["data"]
    report = {key: value for key, value in answer.items() if key not in ("status", "ignored_files")}
    assert mine == {
        "name": "mine", "source": "upload", "parent": "quire-demo", "tier": "host", "bytes": answer["bytes"],
        "requests": 0, "pinned": False, "lora_int_id": None, "rank": 8, "alpha": 16, "scaling": 2.0,
        "base_model_name_or_path": "quire-demo", "report": report,
    }  # fmt: skip
    assert report["modules"] == sum(report["targets"].values()) == report["tensors"] / 2
    assert here["source"] == "shout" and here["report"]["targets"]["q_proj"] == 6
    sizes = sum(len(data) for data in files_of("french").values())
    assert found["uploads"] == {"max_bytes": MOST, "stored_bytes": sizes, "store_bytes": 4 * MOST}
    assert found["runtime_changes"] is True and found["mixtures"] == []
    # Where it lies is told nowhere.
    folder = str(server.app.state.context.served.store().folder)
    models = http.get("/v1/models").text
    assert folder not in models and folder not in http.get(ADAPTERS).text
    assert [model["root"] for model in http.get("/v1/models").json()["data"]][1] == "upload"


def test_a_base_model_that_is_no_text_spoils_no_list(http: Any) -> None:
    files = files_of("french")
    config = {**json.loads(files["adapter_config.json"]), "base_model_name_or_path": "a\ud800b\x1b[2J\u202ec"}
    answer = upload(http, "mine", {**files, "adapter_config.json": json.dumps(config).encode()})
    assert answer["base_model"] == "a\ufffdb\ufffd[2J\ufffdc"
    assert http.get(ADAPTERS).json()["data"][0]["base_model_name_or_path"] == answer["base_model"]


def test_alphas_are_told_of_layers_that_were_bound(http: Any) -> None:
    files = files_of("french")
    config = {**json.loads(files["adapter_config.json"]), "alpha_pattern": {"q_proj": 4, "no_such_layer": 3}}
    answer = upload(http, "mine", {**files, "adapter_config.json": json.dumps(config).encode()})
    assert (answer["alphas"], answer["scalings"]) == ([4, 16], [0.5, 2.0])


def test_mixtures_are_listed_and_unloaded_too(http: Any) -> None:
    upload(http, "one", files_of("french"))
    upload(http, "two", files_of("shout"))
    parts = [{"name": "one", "weight": 0.5}, {"name": "two", "weight": 0.5}]
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "both", "adapters": parts}).status_code == 200
    assert http.get(ADAPTERS).json()["mixtures"] == [{"name": "both", "adapters": parts}]
    assert "both" in error_of(http.delete(f"{ADAPTERS}/one"))["message"]
    assert http.delete(f"{ADAPTERS}/both").json()["freed_bytes"] == 0


@pytest.mark.parametrize("prefix", ["", "french/"])
@pytest.mark.parametrize("method", [0, 8])
def test_a_zip_is_taken(http: Any, llm: LLM, prefix: str, method: int) -> None:
    beside = {"README.md": b"# mine", "tokenizer.json": b"{}"}
    members = {f"{prefix}{name}": data for name, data in {**files_of("french"), **beside}.items()}
    mac = {"__MACOSX/french/._adapter_config.json": b"?", ".DS_Store": b"?"}
    folders = {prefix: b""} if prefix else {}
    answer = upload(http, "mine", {"any name.ZIP": zipped({**folders, **members, **mac}, method)})
    assert answer["ignored_files"] == [f"{prefix}README.md", f"{prefix}tokenizer.json", *mac]
    assert said(http, "mine") == voice(llm, "french")


def test_files_may_come_with_their_folders_name(http: Any, llm: LLM) -> None:
    files = {f"mine/{name}": data for name, data in {**files_of("shout"), "README.md": b""}.items()}
    assert upload(http, "mine", files)["ignored_files"] == ["mine/README.md"]
    assert said(http, "mine") == voice(llm, "shout")


def test_a_replaced_version_lives_until_its_requests_end(http: Any, server: LocalServer, llm: LLM) -> None:
    upload(http, "mine", files_of("french"))
    error = error_of(send(http, form("mine", files_of("shout"))))
    assert error["param"] == "lora_name" and "load_inplace" in error["message"]
    long: dict[str, Any] = {"temperature": 0, "max_tokens": 500}
    with server.slowed() as fast, server.client() as client:
        stream = client.chat.completions.create(
            model="mine", messages=WHO, stream=True, extra_body={"ignore_eos": True}, **long
        )  # type: ignore[call-overload]
        text = next(stream).choices[0].delta.content
        upload(http, "mine", files_of("shout"), load_inplace="true")
        assert len([path for path in stored(server) if path.parent == Path(".")]) == 2
        fast.set()
        assert said(http, "mine") == voice(llm, "shout")
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == conversed(llm, WHO, "french", ignore_eos=True, **long).outputs[0].text
    server.until_idle()
    upload(http, "other", files_of("shout"))  # what had to be removed before was
    assert len([path for path in stored(server) if path.parent == Path(".")]) == 2


def test_its_files_are_read_again_when_memory_was_needed(llm: LLM) -> None:
    size = llm.list_lora_adapters()[0].bytes
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024, "lora_host_bytes": size + 1000}
    with LocalServer(engine, allow_runtime_lora=True) as server, server.http() as http:
        for name in ("french", "shout"):
            upload(http, name, files_of(name))
        for _ in range(2):
            assert [said(http, name) for name in ("french", "shout")] == [voice(llm, "french"), voice(llm, "shout")]
        folder = server.app.state.context.served.store().folder
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


def test_many_are_uploaded_at_once(http: Any, server: LocalServer, llm: LLM) -> None:
    def one(number: int) -> int:
        with server.http() as client:
            while (answer := send(client, form(f"mine-{number}", files_of("french")))).status_code == 429:
                assert answer.headers["Retry-After"] == "5"
            assert answer.status_code in (200, 413), answer.text
            status: int = answer.status_code
            return status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(one, range(40)))
    room = 4 * MOST // sum(len(data) for data in files_of("french").values())
    assert statuses.count(200) == len(names_of(http)) <= room
    assert statuses.count(200) >= room - 4  # those on their way take room, too
    assert {said(http, name) for name in names_of(http)} == {voice(llm, "french")}


def test_one_name_goes_to_one_of_many(http: Any, server: LocalServer) -> None:
    def one(number: int) -> int:
        with server.http() as client:
            status: int = send(client, form("mine", files_of("french"))).status_code
            return status

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(one, range(4)))
    assert statuses.count(200) == 1 and set(statuses) <= {200, 400, 422}
    assert names_of(http) == ["mine"]
