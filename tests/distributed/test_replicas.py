"""Replicas on a cluster of two nodes: answers are a single server's, adapters are everywhere or nowhere, and nothing
sticks when replicas end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quire.demo import adapter_path
from tests.server.api_server import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

CHURN = float(os.environ.get("QUIRE_TEST_CHURN", "30"))  # seconds
ADAPTERS = Path(adapter_path("french")).parent
OPTIONS = {"allow_runtime_lora": True, "lora_root": [str(ADAPTERS)], "served_model_name": ["demo"],
           "response_store_bytes": 1 << 20}  # fmt: skip
PROMPT = "What do you see?"
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}


class Fleet:
    """A deployment with this name. client: of its door."""

    def __init__(self, name: str, **replicas: Any) -> None:
        from quire.distributed import deploy
        from quire.distributed.deployment import read_deployment

        self.name = name
        wanted = {"name": name, "replicas": {"cpus": 1, "downscale_delay_s": 2, "upscale_delay_s": 0.5, **replicas}}
        self.address = deploy.start(read_deployment({**OPTIONS, "port": 0, "deploy": wanted}))
        self.client = httpx.Client(base_url=self.address, timeout=120)

    def ask(self, **fields: Any) -> Any:
        return self.client.post("/v1/completions", json={**BODY, **fields})

    def text(self, **fields: Any) -> str:
        answer = self.ask(**fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, path: str, again: bool = False) -> Any:
        body = {"lora_name": name, "lora_path": str(ADAPTERS / path), "load_inplace": again}
        return self.client.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> Any:
        return self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def count(self) -> int:
        return int(self.client.get("/health").json().get("replicas", 0))

    def wait_for(self, true: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.2)

    def processes(self, of: str = "EngineReplica") -> list[int]:
        """Of its replicas, or of others of its actors."""
        title = f"ray::ServeReplica:{self.name}:{of}".encode()
        return [int(one.parent.name) for one in Path("/proc").glob("[0-9]*/cmdline") if title in _read(one)]

    def end(self) -> None:
        from ray import serve

        self.client.close()
        serve.delete(self.name)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[Fleet]:
    """Two replicas."""
    made = Fleet("two", min=2, max=3)
    yield made
    made.end()


@pytest.fixture(scope="module")
def single() -> Iterator[ServerProcess]:
    """One server, of the same options."""
    flags = ["--allow-runtime-lora", "--lora-root", str(ADAPTERS), "--served-model-name", "demo",
             "--response-store-bytes", str(1 << 20)]  # fmt: skip
    with ServerProcess(*flags) as server:
        yield server


def without_ids(body: bytes) -> bytes:
    """An answer, without what differs from request to request."""
    return re.sub(rb'"(id|created|tier)":("[^"]*"|\d+)', b"", body)


REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", BODY),
    ("POST", "/v1/completions", {**BODY, "model": "french"}),
    ("POST", "/v1/completions", {**BODY, "stream": True}),
    ("POST", "/v1/completions", {**BODY, "model": "nobody"}),
    ("POST", "/v1/completions", {**BODY, "temperature": -1}),
    ("POST", "/v1/completions", {**BODY, "max_tokens": "many"}),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/tokenize", {"model": "demo", "prompt": PROMPT}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}),
    ("GET", "/v1/models", None),
    ("GET", "/version", None),
    ("GET", "/nowhere", None),
    ("DELETE", "/v1/completions", None),
]  # fmt: skip


@pytest.mark.parametrize(
    "method, path, body", REQUESTS, ids=[f"{one[1]}-{place}" for place, one in enumerate(REQUESTS)]
)
def test_answers_are_those_of_one_server(
    fleet: Fleet, single: ServerProcess, method: str, path: str, body: Any
) -> None:
    with single.http() as http:
        want = http.request(method, path, json=body)
    got = fleet.client.request(method, path, json=body)
    assert got.status_code == want.status_code
    assert without_ids(got.content) == without_ids(want.content)
    assert sorted(got.headers) == sorted(want.headers)


def test_bad_json_and_large_bodies_are_refused(fleet: Fleet) -> None:
    answer = fleet.client.post("/v1/load_lora_adapter", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    assert fleet.client.post("/v1/adapters", content=b"x").status_code == 501
    assert fleet.client.post("/sleep").status_code == 501


def test_replicas_answer_doors_alone(fleet: Fleet) -> None:
    from ray import serve

    ledger = serve.get_deployment_handle("AdapterLedger", fleet.name)
    members = ledger.members.remote().result(timeout_s=30)
    assert len(members) == fleet.count() >= 2
    for address in members.values():
        assert httpx.get(f"{address}/v1/models").status_code == 403
        assert httpx.get(f"{address}/v1/models", headers={"x-quire-secret": "0" * 64}).status_code == 403


def test_a_kept_response_is_found_again(fleet: Fleet) -> None:
    for _ in range(6):
        made = fleet.client.post("/v1/responses", json={"model": "demo", "input": "Hi", "max_output_tokens": 4}).json()
        again = fleet.client.get(f"/v1/responses/{made['id']}")
        assert again.status_code == 200 and again.json()["output"] == made["output"]
        body = {"model": "demo", "input": "And?", "max_output_tokens": 4, "previous_response_id": made["id"]}
        assert fleet.client.post("/v1/responses", json=body).status_code == 200


def test_metrics_are_summed(fleet: Fleet) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    fleet.text()
    families = {one.name: one for one in text_string_to_metric_families(fleet.client.get("/metrics").text)}
    samples = [one for one in families["quire_generation_tokens"].samples if one.name.endswith("_total")]
    each = [one.value for one in samples if "replica" in one.labels]
    (whole,) = [one.value for one in samples if "replica" not in one.labels]
    assert len(each) >= 2 and sum(each) == whole > 0


def test_adapters_are_loaded_while_streams_run(fleet: Fleet) -> None:
    """32 streams, and an adapter loaded, replaced and unloaded: each answer is of one version, wholly."""
    want = {name: fleet.text(model=name, max_tokens=48) for name in ("demo", "french", "shout")}
    over = threading.Event()

    def stream(name: str) -> set[str]:
        found = set()
        while not over.is_set():
            answer = fleet.ask(model=name, max_tokens=48)
            if answer.status_code == 200:
                found.add(answer.json()["choices"][0]["text"])
            else:
                assert name == "x" and answer.status_code == 404, answer.text
        return found

    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(stream, name) for name in ["demo", "french", "x", "x"] * 8]
        try:
            for version in range(6):
                answer = fleet.load("x", "french" if version % 2 else "shout", again=True)
                assert answer.status_code == 200, answer.text
                assert fleet.text(model="x", max_tokens=48) == want["french" if version % 2 else "shout"]
            assert fleet.unload("x").json()["status"] == "unloaded"
            assert fleet.ask(model="x").status_code == 404
        finally:
            over.set()
        found = [one.result() for one in asked]
    assert set.union(*found[0::4]) == {want["demo"]} and set.union(*found[1::4]) == {want["french"]}
    assert set.union(*found[2::4], *found[3::4]) <= {want["french"], want["shout"]}


def test_a_replica_is_killed_and_another_begins(fleet: Fleet) -> None:
    """Requests are answered meanwhile, or refused clearly; who comes new has the adapters of the others."""
    want = fleet.text()
    assert fleet.load("kept", "shout").status_code == 200
    kept = fleet.text(model="kept")
    victim = fleet.processes()[0]
    os.kill(victim, signal.SIGKILL)
    for _ in range(20):  # the ledger still counts it; another takes its requests
        answer = fleet.ask()
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == want
        else:
            assert answer.status_code == 503 and answer.json()["error"]["message"]
    fleet.wait_for(lambda: victim not in fleet.processes() and len(fleet.processes()) == 2 == fleet.count())
    with ThreadPoolExecutor(16) as pool:  # more than one replica would take
        assert {one.result() for one in [pool.submit(fleet.text, model="kept") for _ in range(32)]} == {kept}
    assert fleet.unload("kept").status_code == 200


def test_a_stream_whose_replica_is_killed_ends_with_an_error(fleet: Fleet) -> None:
    body = {**BODY, "n": 16, "max_tokens": 2000, "ignore_eos": True, "stream": True}  # which takes seconds
    before = fleet.processes()
    with fleet.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for process in before:
            os.kill(process, signal.SIGKILL)
        *_, last = (line for line in lines if line)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_ended"
    fleet.wait_for(lambda: fleet.count() == 2)
    assert fleet.text()


def test_a_file_of_requests_is_answered_though_a_replica_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    """Each line once, with the answer of an undisturbed request."""
    fields = [{"model": name, "max_tokens": 200, "ignore_eos": True} for name in ("demo", "french")]
    want = [fleet.text(**one) for one in fields]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": str(place), **asked, "body": {**BODY, **fields[place % 2]}} for place in range(120)]
    refused = {"custom_id": "refused", **asked, "body": {**BODY, "model": "nobody"}}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, refused]))
    command = [sys.executable, "-m", "quire", "run-batch", str(file), str(out), "--url", fleet.address]
    with subprocess.Popen([*command, "--max-concurrency", "12"]) as process:
        fleet.wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") > 3)
        os.kill(fleet.processes()[0], signal.SIGKILL)
    assert process.returncode == 3  # one of them is refused
    found = {one["custom_id"]: one["response"] for one in map(json.loads, out.read_text().splitlines())}
    assert len(found) == 121 == out.read_bytes().count(b"\n") and found.pop("refused")["status_code"] == 404
    for name, one in found.items():
        assert one["status_code"] == 200 and one["body"]["choices"][0]["text"] == want[int(name) % 2]
    fleet.wait_for(lambda: fleet.count() == 2 == len(fleet.processes()))


def test_the_ledger_is_killed(fleet: Fleet) -> None:
    """Requests go on, and the new one knows what there is."""
    assert fleet.load("before", "shout").status_code == 200
    want = fleet.text(model="before")
    (process,) = fleet.processes("AdapterLedger")
    os.kill(process, signal.SIGKILL)
    assert fleet.text()
    fleet.wait_for(lambda: fleet.load("after", "french", again=True).status_code == 200)
    assert fleet.text(model="before") == want
    assert fleet.unload("before").status_code == 200 == fleet.unload("after").status_code


@pytest.mark.timeout(600 + CHURN)
def test_churn(fleet: Fleet) -> None:
    """Versions of an adapter come and go, and replicas and the ledger are killed: each answer is wholly of one version,
    and none is of an older one than an answer before it. QUIRE_TEST_CHURN: for so many seconds."""
    texts = {fleet.text(model="french", max_tokens=32): "french", fleet.text(model="shout", max_tokens=32): "shout"}
    end = time.monotonic() + CHURN
    changes: list[tuple[float, float, str]] = []  # asked, answered, what it stands for then
    seen: list[tuple[float, float, str]] = []
    refused: Counter[str] = Counter()
    kills: Counter[str] = Counter()

    def asking() -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            answer = fleet.ask(model="y", max_tokens=32)
            if answer.status_code in (200, 404):
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""
                seen.append((began, time.monotonic(), texts.get(text, text)))
            else:
                assert answer.status_code == 503, answer.text
                refused["requests"] += 1

    def changing(draw: random.Random) -> None:
        while time.monotonic() < end:
            began, wanted = time.monotonic(), draw.choice(["french", "shout", "french", "shout", ""])
            answer = fleet.load("y", wanted, again=True) if wanted else fleet.unload("y")
            if answer.status_code in (200, 404):
                changes.append((began, time.monotonic(), wanted))
            else:  # perhaps it was made, perhaps not
                assert answer.status_code == 503, answer.text
                changes.append((began, float("inf"), wanted))
                refused["changes"] += 1

    def killing(draw: random.Random) -> None:
        """One after the other: what all of them had is gone where all end before another has it."""
        killed = time.monotonic()
        while time.monotonic() < end - 10:
            time.sleep(0.5)
            made = any(began > killed and ended < float("inf") for began, ended, _ in list(changes))
            if made and time.monotonic() - killed > 6 and fleet.count() == 2 == len(fleet.processes()):
                kind = draw.choice(["EngineReplica", "EngineReplica", "AdapterLedger"])
                if found := fleet.processes(kind):
                    os.kill(draw.choice(found), signal.SIGKILL)
                    killed = time.monotonic()
                    kills[kind] += 1

    with ThreadPoolExecutor(10) as pool:
        running = [pool.submit(asking) for _ in range(8)]
        running += [pool.submit(work, random.Random(5)) for work in (changing, killing)]
    for one in running:
        one.result()
    assert {what for *_, what in seen} <= {"french", "shout", ""}  # no mixture
    for began, ended, what in seen:
        before = max((one for one in changes if one[1] < began), default=(0.0, 0.0, ""))
        possible = {before[2]} | {one[2] for one in changes if one[0] < ended and one[1] > before[0]}
        assert what in possible, (began, ended, what, before)
    print(f"{len(seen)} answers, {len(changes)} changes, refused: {dict(refused)}, killed: {dict(kills)}")
    fleet.wait_for(lambda: fleet.count() == 2 == len(fleet.processes()))
    fleet.wait_for(lambda: fleet.load("y", "shout", again=True).status_code == 200)
    assert {fleet.text(model="y", max_tokens=32) for _ in range(8)} == {next(t for t in texts if texts[t] == "shout")}


def test_it_scales_to_none_and_back(cluster: Any) -> None:
    fleet = Fleet("none", min=0, initial=1, max=2)
    try:
        want = fleet.text()
        fleet.wait_for(lambda: fleet.count() == 0)
        assert fleet.client.get("/health").status_code == 200
        assert fleet.text() == want
        assert fleet.count() >= 1
    finally:
        fleet.end()
