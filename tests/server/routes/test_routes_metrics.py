"""Other routes: metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import quire
from quire import LLM
from quire.config import ServerConfig
from quire.errors import QuireError
from tests.server.api_answers import events, post, refusal
from tests.server.api_server import LocalServer
from tests.server.routes.helpers import COMPLETIONS, PROMPT, answer_of

pytestmark = pytest.mark.usefixtures("one_thread")

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
    end = time.monotonic() + 60
    while any(http.get("/load").json().values()):  # what other tests have left may be ending
        assert time.monotonic() < end
        time.sleep(0.01)
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
    "cache_config_info", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)  # fmt: skip
VLLMS_TIMES = (
    "time_to_first_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens",
)  # fmt: skip


def test_metrics_have_twins_of_vllms_names(twins: Any, http: Any) -> None:
    post(twins, COMPLETIONS, prompt="abc", max_tokens=5, n=2, seed=1, ignore_eos=True)
    post(twins, COMPLETIONS, prompt="abcd", max_tokens=1, ignore_eos=True)
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
