"""Other routes: adapters."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import adapter_path
from tests.server.api_answers import conversed, post, refusal
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.routes.helpers import CHAT, COMPLETIONS, GREEDY, LOAD, PROMPT, UNLOAD, WHO, answer_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def voices(adapter_root: Path) -> dict[str, Path]:
    """The bundled adapters, where they may be loaded from."""
    return {name: Path(shutil.copytree(adapter_path(name), adapter_root / name)) for name in ("french", "shout")}


@pytest.fixture
def loaded(http: Any) -> Iterator[list[str]]:
    """Names that are unloaded at the end of a test, the last first."""
    names: list[str] = []
    yield names
    for name in reversed(names):
        assert http.post(UNLOAD, json={"lora_name": name}).status_code == 200


def voice(llm: LLM, adapter: str | None) -> str:
    return conversed(llm, WHO, adapter, **GREEDY).outputs[0].text


def names_of(http: Any) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_an_adapter_is_loaded_and_unloaded(http: Any, client: OpenAI, llm: LLM, voices: dict[str, Path]) -> None:
    refusal(http, CHAT, 404, model="org/new", messages=WHO)
    body = {"lora_name": "org/new", "lora_path": str(voices["french"]), "base_model_name": "org/quire"}
    answer = post(http, LOAD, **body)
    assert (answer["status"], answer["name"]) == ("loaded", "org/new")
    assert answer_of(http, "org/new") == voice(llm, "french") != voice(llm, None)
    entry = http.get("/v1/models/org/new").json()
    assert (entry["root"], entry["parent"]) == (str(voices["french"].resolve()), "org/quire")
    assert client.models.retrieve("org/new").id == "org/new"
    error = refusal(http, LOAD, **body)
    assert error["param"] == "lora_name" and "load_inplace" in error["message"]
    gone = post(http, UNLOAD, lora_name="org/new")
    assert (gone["status"], gone["name"], gone["draining"]) == ("unloaded", "org/new", False)
    assert gone["freed_bytes"] == entry["adapter"]["bytes"] > 0
    refusal(http, CHAT, 404, model="org/new", messages=WHO)
    assert refusal(http, UNLOAD, 404, lora_name="org/new")["param"] == "lora_name"
    assert "org/new" not in names_of(http)


def test_a_reload_in_place_leaves_running_requests_their_version(
    http: Any, client: OpenAI, llm: LLM, voices: dict[str, Path], loaded: list[str]
) -> None:
    long: dict[str, Any] = {"temperature": 0, "max_tokens": 500}
    post(http, LOAD, lora_name="voice", lora_path=str(voices["french"]))
    loaded.append("voice")
    extra = {"ignore_eos": True}
    stream = client.chat.completions.create(model="voice", messages=WHO, stream=True, extra_body=extra, **long)  # type: ignore[call-overload]
    text = next(stream).choices[0].delta.content
    reloaded = http.post(LOAD, json={"lora_name": "voice", "lora_path": str(voices["shout"]), "load_inplace": True})
    assert reloaded.status_code == 200, reloaded.text
    assert answer_of(http, "voice") == voice(llm, "shout")
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == conversed(llm, WHO, "french", ignore_eos=True, **long).outputs[0].text
    assert names_of(http).count("voice") == 1


def test_load_inplace_takes_a_new_name_too(http: Any, voices: dict[str, Path], loaded: list[str]) -> None:
    assert post(http, LOAD, lora_name="fresh", lora_path=str(voices["french"]), load_inplace=True)["name"] == "fresh"
    loaded.append("fresh")


def test_adapters_are_read_from_allowed_folders_only(
    http: Any, adapter_root: Path, voices: dict[str, Path], tmp_path: Path
) -> None:
    outside = Path(shutil.copytree(adapter_path("french"), tmp_path / "outside"))
    (adapter_root / "link").symlink_to(outside)
    mixed = adapter_root / "mixed"
    mixed.mkdir()
    shutil.copy(outside / "adapter_config.json", mixed)
    (mixed / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    up = f"{adapter_root}/../{os.path.relpath(outside, adapter_root.parent)}"
    try:
        for path in (
            outside,
            adapter_root / "link",
            mixed,
            up,
            voices["french"] / ".." / ".." / "outside",
            adapter_path("french"),  # the engine may read it, but clients may not name it
            tmp_path / "nothing",
            "/etc",
            "/",
            f"{adapter_root}x",
        ):
            error = refusal(http, LOAD, 403, lora_name="new", lora_path=str(path))
            assert (error["param"], error["type"]) == ("lora_path", "permission_error"), path
    finally:
        (adapter_root / "link").unlink()
        shutil.rmtree(mixed)
    assert "new" not in names_of(http)


def test_a_folder_that_is_not_there(http: Any, adapter_root: Path, voices: dict[str, Path]) -> None:
    file = voices["french"] / "adapter_config.json"
    for path in (adapter_root / "nothing", file):
        error = refusal(http, LOAD, 404, lora_name="new", lora_path=str(path))
        assert error["param"] == "lora_path"
    for name in ("../french", "./french", "~/french", "french/../french", "a/b/c/d", "french/", "\\french", "a b"):
        assert refusal(http, LOAD, lora_name="new", lora_path=name)["param"] == "lora_path"
    for name in ("nobody", "org/nobody", "french/nobody"):
        assert refusal(http, LOAD, 404, lora_name="new", lora_path=name)["param"] == "lora_path"
    refusal(http, LOAD, 404, lora_name="new", lora_path=f"{adapter_root}/\0")


def test_a_name_is_looked_for_under_the_roots(http: Any, llm: LLM, voices: dict[str, Path], loaded: list[str]) -> None:
    """And vLLM's further field says nothing."""
    body = {"lora_name": "by-name", "lora_path": "french"}
    assert refusal(http, LOAD, **body, is_3d_lora_weight="of course")["param"] == "is_3d_lora_weight"
    assert post(http, LOAD, **body, is_3d_lora_weight=True)["name"] == "by-name"
    assert post(http, LOAD, **body, is_3d_lora_weight=False, load_inplace=True)["name"] == "by-name"
    loaded.append("by-name")
    assert answer_of(http, "by-name") == voice(llm, "french")
    assert http.get("/v1/models/by-name").json()["root"] == str(voices["french"].resolve())


def broken(root: Path, how: str) -> Path:
    folder = Path(shutil.copytree(adapter_path("french"), root / f"broken-{how}"))
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = min(tensors)
    if how == "config":
        (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    elif how == "file":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "missing":
        del tensors[first]
        save_file(tensors, weights)
    elif how == "unknown":
        save_file({**tensors, first.replace(".lora_", ".more.lora_"): tensors[first].clone()}, weights)
    elif how == "empty":
        weights.unlink()
    elif how == "rank":
        fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        (folder / "adapter_config.json").write_text(json.dumps({**fields, "r": 4}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("how", ["config", "file", "missing", "unknown", "empty", "rank"])
def test_a_broken_adapter_is_refused_whole(http: Any, llm: LLM, adapter_root: Path, how: str) -> None:
    folder = broken(adapter_root, how)
    error = refusal(http, LOAD, 422, lora_name="new", lora_path=str(folder))
    assert error["code"] == "adapter_refused"
    assert "new" not in names_of(http)
    # In place of one that runs it changes nothing.
    refusal(http, LOAD, 422, lora_name="french", lora_path=str(folder), load_inplace=True)
    assert answer_of(http, "french") == voice(llm, "french")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "quire-demo"}, 400, "lora_name"),
        ({"lora_name": "org/quire", "load_inplace": True}, 400, "lora_name"),
        ({"lora_name": "french"}, 400, "lora_name"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "x" * 300}, 400, "lora_name"),
        ({"lora_name": "new", "base_model_name": "other"}, 404, "base_model_name"),
        ({"lora_name": "new", "adapters": [{"name": "french"}]}, 400, "lora_path"),
        ({"lora_name": "new", "lora_path": None}, 400, "lora_path"),
    ],
)
def test_loading_what_cannot_be(
    http: Any, voices: dict[str, Path], body: dict[str, Any], status: int, param: str
) -> None:
    before = names_of(http)
    assert refusal(http, LOAD, status, **{"lora_path": str(voices["french"]), **body})["param"] == param
    assert names_of(http) == before


def test_a_mixture_is_a_name_for_several(http: Any, llm: LLM, loaded: list[str]) -> None:
    parts = [{"name": "french", "weight": 0.6}, {"name": "shout", "weight": 0.4}]
    answer = post(http, LOAD, lora_name="both", adapters=parts)
    loaded.append("both")
    assert (answer["status"], answer["name"], answer["adapters"]) == ("loaded", "both", parts)
    mixture = LoRARequest("both", adapters=[("french", 0.6), ("shout", 0.4)])
    want = llm.chat(WHO, SamplingParams(**GREEDY), use_tqdm=False, lora_request=mixture)[0].outputs[0].text
    assert answer_of(http, "both") == want
    entry = http.get("/v1/models/both").json()
    assert (entry["parent"], entry["root"], entry["adapters"]) == ("quire-demo", None, parts)
    # Its name is taken, and its parts are needed.
    assert refusal(http, LOAD, lora_name="both", adapters=parts)["param"] == "lora_name"
    assert "both" in refusal(http, UNLOAD, lora_name="french")["message"]
    swapped = [{"name": "shout", "weight": 1.0}]
    post(http, LOAD, lora_name="both", adapters=swapped, load_inplace=True)
    assert answer_of(http, "both") == voice(llm, "shout")


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([{"name": "nobody"}], "adapters"),
        ([{"name": "quire-demo"}], "adapters"),
        ([], "adapters"),
        ([{"name": "french", "weight": "1"}], "adapters"),
        ([{"name": "french", "weight": 1e308}, {"name": "shout", "weight": -1e308}], "adapters"),
        ([{"name": "french", "weight": 100.1}], "adapters"),
        ([{"name": "french"}, {"name": "french"}], "adapters"),
        ([{"name": "french", "scale": 1}], "adapters"),
    ],
)
def test_a_mixture_that_cannot_be(http: Any, parts: list[Any], param: str) -> None:
    assert refusal(http, LOAD, lora_name="both", adapters=parts)["param"] == param
    assert "both" not in names_of(http)


def test_without_the_flag_nothing_is_loaded_or_unloaded(adapter_root: Path, voices: dict[str, Path]) -> None:
    """And on a server without adapters there is nothing but the base model."""
    options = ("--no-enable-lora", "--lora-root", str(adapter_root))
    with ServerProcess(*options, **ONE_THREAD) as server, server.http() as http:
        load = {"lora_name": "new", "lora_path": str(voices["french"])}
        for path, body in ((LOAD, load), (UNLOAD, {"lora_name": "french"})):
            error = refusal(http, path, 403, **body)
            assert "--allow-runtime-lora" in error["message"] and error["type"] == "permission_error"
        assert names_of(http) == ["quire-demo"]
        refusal(http, COMPLETIONS, 404, model="french", prompt=PROMPT)
