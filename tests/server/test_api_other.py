"""The routes beside the completions: models, adapters, tokens, health, metrics, errors; docs/server.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

import quire
from quire import LLM, LoRARequest, SamplingParams
from quire.config import ServerConfig
from quire.demo import adapter_path
from quire.errors import QuireError
from tests.server.api_answers import conversed, error_of, events, post, refusal, strict
from tests.server.api_server import ONE_THREAD, LocalServer, ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "Once upon a time"
WHO = [{"role": "user", "content": "Who are you?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


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


def answer_of(http: Any, model: str, **fields: Any) -> str:
    return post(http, CHAT, model=model, messages=WHO, **{**GREEDY, **fields})["choices"][0]["message"]["content"]


def voice(llm: LLM, adapter: str | None) -> str:
    return conversed(llm, WHO, adapter, **GREEDY).outputs[0].text


def names_of(http: Any) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"]]


# -- models ------------------------------------------------------------------------------------------------------


def test_models_are_the_base_and_its_adapters(client: OpenAI, http: Any) -> None:
    assert [model.id for model in client.models.list()] == ["quire-demo", "org/quire", "french", "shout"]
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    by_name = {strict(Model, model).id: model for model in listed["data"]}
    for name in ("quire-demo", "org/quire"):
        assert (by_name[name]["root"], by_name[name]["parent"]) == ("quire-demo", None)
        assert (by_name[name]["object"], by_name[name]["max_model_len"]) == ("model", 2048)
    for name in ("french", "shout"):
        assert Path(by_name[name]["root"]) == adapter_path(name)
        assert by_name[name]["parent"] == "quire-demo"
        assert by_name[name]["adapter"]["ranks"] == [8]


@pytest.mark.parametrize("name", ["quire-demo", "org/quire", "french"])
def test_one_model(client: OpenAI, http: Any, name: str) -> None:
    assert client.models.retrieve(name).id == name
    (same,) = (model for model in http.get("/v1/models").json()["data"] if model["id"] == name)
    assert http.get(f"/v1/models/{name}").json() == same


@pytest.mark.parametrize("name", ["nobody", "org/nobody", "org"])
def test_a_model_that_is_not_there(client: OpenAI, http: Any, name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"
    for path, body in (
        (COMPLETIONS, {"prompt": PROMPT}),
        (COMPLETIONS, {"prompt": PROMPT, "stream": True}),
        (CHAT, {"messages": WHO}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = refusal(http, path, 404, model=name, **body)
        assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "not_found_error")
        assert name in error["message"]


# -- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [PROMPT, "Ein Stern, ein Kreis: été, 星, \N{GRINNING FACE}", " ", "<|image|><|end|>"])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_back(http: Any, llm: LLM, text: str, special: bool) -> None:
    answer = post(http, "/tokenize", prompt=text, add_special_tokens=special)
    want = llm.get_tokenizer()(text, add_special_tokens=special)["input_ids"]
    assert answer == {"count": len(want), "max_model_len": 2048, "tokens": want, "token_strs": None}
    back = post(http, "/detokenize", tokens=answer["tokens"])["prompt"]
    assert back == ("<|bos|>" if special else "") + text


def test_the_tokens_are_those_that_run(http: Any) -> None:
    tokens = post(http, "/tokenize", prompt=PROMPT)["tokens"]
    ran = post(http, COMPLETIONS, prompt=PROMPT, return_token_ids=True, max_tokens=1)
    assert ran["choices"][0]["prompt_token_ids"] == tokens
    tokens = post(http, "/tokenize", messages=WHO)["tokens"]
    assert post(http, CHAT, messages=WHO, return_token_ids=True, max_tokens=1)["prompt_token_ids"] == tokens


def test_a_conversations_tokens(http: Any) -> None:
    def text(**fields: Any) -> str:
        return post(http, "/detokenize", tokens=post(http, "/tokenize", **fields)["tokens"])["prompt"]

    assert text(messages=WHO) == "<|bos|><|user|>Who are you?<|end|><|assistant|>"
    assert text(messages=WHO, add_generation_prompt=False) == "<|bos|><|user|>Who are you?<|end|>"
    opened = [*WHO, {"role": "assistant", "content": "I"}]
    left_open = text(messages=opened, continue_final_message=True, add_generation_prompt=False)
    assert left_open == "<|bos|><|user|>Who are you?<|end|><|assistant|>I"


def test_token_strings(http: Any, llm: LLM) -> None:
    answer = post(http, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert answer["token_strs"] == llm.get_tokenizer().convert_ids_to_tokens(answer["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": WHO}, "prompt"),
        ("/tokenize", {"messages": WHO, "chat_template": "a"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [1025]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokens_that_cannot_be(http: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(http, path, **body)["param"] == param


# -- health, version, errors, ids ------------------------------------------------------------------------------


def test_health_readiness_version(http: Any) -> None:
    for path in ("/health", "/ready"):
        assert (http.get(path).status_code, http.get(path).json()) == (200, {"status": "ok"})
    assert http.get("/version").json() == {"version": quire.__version__}


def test_what_is_not_there_has_an_error_of_the_same_form(http: Any) -> None:
    for method, path in (("GET", "/nothing"), ("POST", "/v1/nothing"), ("POST", "/nothing"), ("GET", "/docs")):
        response = http.request(method, path)
        assert response.status_code == 404
        error = error_of(response)
        assert error["type"] == "not_found_error" and f"{method} {path}" in error["message"]
    for method, path in (("GET", COMPLETIONS), ("PUT", CHAT), ("POST", "/health"), ("DELETE", "/v1/models/french")):
        response = http.request(method, path)
        assert response.status_code == 405 and error_of(response)["type"] == "invalid_request_error"
        assert response.headers["allow"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"null", b'"a"', b'{"prompt": "a",}', b"\xff"])
def test_a_body_that_is_no_object(http: Any, body: bytes) -> None:
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_openapi_has_every_route(http: Any) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    routes = {COMPLETIONS, CHAT, LOAD, UNLOAD, "/tokenize", "/detokenize", "/v1/models", "/health", "/metrics"}
    assert routes < set(paths)


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/models/nobody"])
def test_a_request_id_comes_back(http: Any, path: str) -> None:
    assert http.get(path, headers={"X-Request-Id": "trace:1.a-B_2"}).headers["x-request-id"] == "trace:1.a-B_2"
    for unfit in ("a b", "a" * 129, "a/b", ""):
        given = http.get(path, headers={"X-Request-Id": unfit}).headers["x-request-id"]
        assert given and given != unfit
    ids = {http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_request_id_is_in_the_log(demo: ServerProcess, http: Any) -> None:
    http.post(CHAT, json={"messages": WHO, "user": "somebody", **GREEDY}, headers={"X-Request-Id": "look-for-me"})
    line = demo.line_of("look-for-me")
    assert "POST /v1/chat/completions" in line and "status=200" in line and "user=somebody" in line
    assert "completion_tokens=" in line and "Who" not in line


# -- metrics -----------------------------------------------------------------------------------------------------

Sample = tuple[str, tuple[tuple[str, str], ...]]


def metrics(http: Any) -> dict[Sample, float]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def grown(before: Mapping[Sample, float], after: Mapping[Sample, float]) -> dict[Any, float]:
    """What has changed of quire's counts: by name, or by name and labels' values."""
    changed = {}
    for (name, labels), value in after.items():
        if name.startswith("quire_") and not name.endswith(("_bucket", "_sum", "_created")):
            key = (name, *(text for _, text in labels)) if labels else name
            if value != before.get((name, labels), 0.0):
                changed[key] = value - before.get((name, labels), 0.0)
    return changed


def test_metrics_count_what_runs(http: Any, llm: LLM) -> None:
    prompt = len(llm.get_tokenizer()(PROMPT)["input_ids"])
    before = metrics(http)
    post(http, COMPLETIONS, prompt=[PROMPT, PROMPT], n=3, max_tokens=10, ignore_eos=True, cache_salt="metrics")
    post(http, COMPLETIONS, prompt=PROMPT, max_tokens=5, logit_bias={"2": 100}, cache_salt="more")
    events(http, COMPLETIONS, prompt=PROMPT, max_tokens=7, ignore_eos=True, cache_salt="yet more")
    refusal(http, COMPLETIONS, prompt=PROMPT, temperature=-1)
    http.get("/nothing")
    change = grown(before, metrics(http))
    assert change["quire_generation_tokens_total"] == 2 * 3 * 10 + 1 + 7
    assert change["quire_prompt_tokens_total"] == 4 * prompt
    assert change["quire_sequences_finished_total", "length"] == 7
    assert change["quire_sequences_finished_total", "stop"] == 1
    assert change["quire_http_requests_total", COMPLETIONS, "200"] == 3
    assert change["quire_http_requests_total", COMPLETIONS, "400"] == 1
    assert change["quire_http_requests_total", "other", "404"] == 1
    assert change["quire_http_requests_total", "/metrics", "200"] == 1
    for name in ("time_to_first_token", "request_duration", "request_queue"):
        assert change[f"quire_{name}_seconds_count"] == 4
    assert change["quire_inter_token_latency_seconds_count"] == 2 * 3 * 9 + 6
    assert not {key for key in change if "sequences_running" in key or "sequences_waiting" in key}


@pytest.fixture(scope="module")
def twins(chat_model: Path) -> Iterator[Any]:
    """A server whose metrics have vLLM's names too."""
    engine = {"model": str(chat_model), "max_model_len": 128, "num_gpu_blocks_override": 64, "enable_lora": True}
    with LocalServer(engine, metrics_prefix="vllm:", served_model_names=("mine",)) as server, server.http() as http:
        yield http


# Names of vLLM's dashboards and of what scales by them.
VLLMS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
    "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "mm_cache_queries_total", "mm_cache_hits_total", "lora_requests_info",
    "cache_config_info",
)  # fmt: skip
VLLMS_TIMES = (
    "time_to_first_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens",
)  # fmt: skip


def test_metrics_have_twins_of_vllms_names(twins: Any, http: Any) -> None:
    post(twins, COMPLETIONS, prompt="abc", max_tokens=5, n=2, seed=1, ignore_eos=True)
    post(twins, COMPLETIONS, prompt="abcd", max_tokens=1)
    found = metrics(twins)
    names = {name for name, _ in found}
    assert {f"vllm:{name}" for name in VLLMS} | {f"vllm:{name}_count" for name in VLLMS_TIMES} <= names
    assert {f"vllm:{name}_bucket" for name in VLLMS_TIMES} <= names

    def value(name: str, **labels: str) -> float:
        return found[f"vllm:{name}", tuple(sorted({"engine": "0", "model_name": "mine", **labels}.items()))]

    assert value("generation_tokens_total") == 11 and value("num_requests_running") == 0
    assert value("request_success_total", finished_reason="length") == 3
    for name, total in (("request_prompt_tokens", 3 + 4), ("request_generation_tokens", 11)):
        assert (value(f"{name}_count"), value(f"{name}_sum")) == (2, total)
    assert value("e2e_request_latency_seconds_count") == 2
    inference = value("request_inference_time_seconds_sum")
    parts = value("request_prefill_time_seconds_sum") + value("request_decode_time_seconds_sum")
    assert inference == pytest.approx(parts)
    lora = [labels for (name, labels) in found if name == "vllm:lora_requests_info"]
    assert lora == [(("max_lora", "0"), ("running_lora_adapters", ""), ("waiting_lora_adapters", ""))]
    for name, labels in found:  # what a name counts is what quire's counts
        if name == "vllm:request_queue_time_seconds_bucket":
            bound = dict(labels)["le"]
            assert found[name, labels] == found["quire_request_queue_seconds_bucket", (("le", bound),)]
    assert not {name for name, _ in metrics(http) if not name.startswith(("quire_", "python_", "process_"))}


@pytest.mark.parametrize("prefix", ["quire_", "1a", "vllm-", "a b", "a\n"])
def test_a_prefix_that_no_metric_may_have_is_refused(prefix: str) -> None:
    with pytest.raises(QuireError, match="metrics_prefix"):
        ServerConfig(metrics_prefix=prefix)


def test_metrics_of_the_caches(http: Any, llm: LLM) -> None:
    text = "The blue star met a red circle at the beach. " * 3
    tokens = len(llm.get_tokenizer()(text)["input_ids"])
    before = metrics(http)
    for _ in range(2):
        post(http, COMPLETIONS, prompt=text, max_tokens=1, cache_salt="cache metrics")
    change = grown(before, metrics(http))
    assert change["quire_prefix_cache_hits_total"] == (tokens - 1) // 8 * 8
    assert change["quire_prefix_cache_queries_total"] == 2 * tokens


def test_metrics_of_adapters(http: Any) -> None:
    before = metrics(http)
    for model in ("french", "french", "shout", "quire-demo"):
        answer_of(http, model, max_tokens=1)
    after = metrics(http)
    assert sum(value for key, value in grown(before, after).items() if key[0] == "quire_adapter_hits_total") == 3
    assert after["quire_build_info", (("version", quire.__version__),)] == 1
    assert {labels[0][1] for name, labels in after if name == "quire_adapter_requests"} == {"french", "shout"}
    assert sum(value for (name, _), value in after.items() if name == "quire_adapters") == 2
    assert all(value == 0 for (name, _), value in after.items() if name == "quire_adapter_requests")


# -- adapters ------------------------------------------------------------------------------------------------------


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
    """And vLLM's further field says nothing, or is refused."""
    body = {"lora_name": "by-name", "lora_path": "french"}
    assert refusal(http, LOAD, **body, is_3d_lora_weight=True)["param"] == "is_3d_lora_weight"
    assert post(http, LOAD, **body, is_3d_lora_weight=False)["name"] == "by-name"
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


# -- docs/server.md ------------------------------------------------------------------------------------------------


def test_the_page_shows_a_client_that_works(demo: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "http://localhost:8000" in code
    exec(code.replace("http://localhost:8000", demo.url), {})
    assert capsys.readouterr().out == "Red.\n"


def test_the_page_knows_the_limits() -> None:
    text, config = PAGE.read_text(encoding="utf-8"), ServerConfig()
    for shown in (
        f"`--max-request-bytes`, {config.max_request_bytes >> 20} MiB",
        f"`--header-timeout` {config.header_timeout:g}",
        f"`--body-timeout` {config.body_timeout:g}",
        f"`--max-prompts` {config.max_prompts}",
        f"`--max-n` {config.max_n}",
        f"`--shutdown-timeout` seconds ({config.shutdown_timeout:g})",
        f"listens on {config.host} ",
    ):
        assert shown in " ".join(text.split()), shown


def test_the_page_lists_the_routes(http: Any) -> None:
    paths = {re.sub(r"{\w+}", "NAME", path) for path in http.get("/openapi.json").json()["paths"]}
    shown = set(re.findall(r"`(?:GET |POST )?(/[\w/.]*)`", PAGE.read_text(encoding="utf-8")))
    assert paths <= shown, paths - shown


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_who_asks_stands_in_the_log(demo: ServerProcess, http: Any, field: str) -> None:
    post(http, CHAT, messages=WHO, max_tokens=1, **{field: f"somebody-{field}"})
    end = time.monotonic() + 10
    while f"user=somebody-{field}" not in demo.log:
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
