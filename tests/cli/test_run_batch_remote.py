"""`quire run-batch --url`: the answers of a server that runs, each line once, whatever happens to either of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.server.batch import run as batch
from tests.cli.test_run_batch import BATCH, TEXT, answers, comparable, line, run, write
from tests.server.api_server import ServerProcess


def test_the_answers_are_the_servers(demo: ServerProcess, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    result = run(file, out, "--url", demo.url)
    assert result.exit_code == 3, result.output
    assert "8 with 200, 2 with 400, 1 with 404" in result.stderr and "loading" not in result.stderr
    found = answers(out)
    with demo.http() as client:
        for one in BATCH:
            expected = client.post(one["url"], json=one["body"])
            assert found[one["custom_id"]]["status_code"] == expected.status_code
            assert comparable(found[one["custom_id"]]["body"]) == comparable(expected.json()), one["custom_id"]
    assert run(file, out, "--url", "http://localhost:1").exit_code == 3  # nothing is left to ask


def test_killed_it_goes_on_and_each_line_has_one_answer(demo: ServerProcess, tmp_path: Path) -> None:
    more = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
    requests = [line(f"r{place}", TEXT, prompt=f"Once {place}", **more) for place in range(24)]
    file, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(file), "-o", str(out), "--url", demo.url]
    with subprocess.Popen([*command, "--max-concurrency", "2"], stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    kept = out.read_bytes().rpartition(b"\n")[0] + b"\n"
    done = kept.count(b"\n")
    assert 3 <= done < 24
    with open(out, "ab") as half:
        half.write(b'{"id":"batch-0123')
    result = run(file, out, "--url", demo.url)
    assert result.exit_code == 0 and f"24 requests, {done} of them answered before" in result.stderr
    assert out.read_bytes().startswith(kept)
    found = answers(out)
    with demo.http() as client:
        for one in requests[:: len(requests) // 4]:
            expected = client.post(TEXT, json=one["body"]).json()
            assert found[one["custom_id"]]["body"]["choices"] == expected["choices"]
    assert len(found) == 24


OK = (200, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
BUSY = (429, {"error": {"message": "the queue is full"}})
AWAY = (503, {"error": {"message": "it starts"}})
BROKEN = (503, {"error": {"message": "it ended", "code": "replica_ended"}})
WRONG = (400, {"error": {"message": "prompt: is too long"}})


class Scripted:
    """A server that says to each prompt what its script says, one after the other, and the last of it forever.

    A text is sent as it is, with status 502; None: the connection ends. most: requests that it had at once. A prompt
    "poison" ends all that runs. together: requests that are answered at once; their number is a multiple of it.
    models: what it says to who asks for them: the status, and the body.
    """

    def __init__(
        self, scripts: dict[str, list[Any]], models: int = 200, list_of_them: bytes = b"{}", together: int = 1
    ) -> None:
        self.scripts = scripts
        self.list_of_them = list_of_them
        self.together = threading.Barrier(together)
        self.models = models
        self.asked: Counter[str] = Counter()
        self.requests = 0
        self.keys: list[str | None] = []
        self.most = self.now = 0
        self.connections = 0
        self.away = range(0)  # which connections are closed at once
        self.ends = 0  # times that all that runs has ended
        self.lock = threading.Lock()

    def say(self, prompt: str) -> Any:
        with self.lock:
            place = self.asked[prompt]
            self.asked[prompt] += 1
            self.requests += 1
            self.now += 1
            self.most = max(self.most, self.now)
            self.ends += prompt == "poison"
            before = self.ends
        if prompt != "poison":
            self.together.wait(120)
            time.sleep(0.03)
        with self.lock:
            self.now -= 1
        script = self.scripts.get(prompt, [OK])
        return None if prompt == "poison" or self.ends != before else script[min(place, len(script) - 1)]


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    scripted: Scripted

    def verify_request(self, request: object, client_address: object) -> bool:
        self.scripted.connections += 1
        return self.scripted.connections not in self.scripted.away


@contextmanager
def serving(scripted: Scripted) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            scripted.keys.append(self.headers["Authorization"])
            self.send(scripted.models, scripted.list_of_them, {"Location": "http://elsewhere/v1/models"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = scripted.say(body["prompt"])
            if said is None:
                self.close_connection = True
            elif isinstance(said, str):
                self.send(502, said.encode(), {})
            else:
                self.send(said[0], json.dumps(said[1], indent=1).encode(), said[2] if said[2:] else {})

        def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    server.scripted = scripted
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_PAUSES", (0.005, 0.02))


def count_requests(monkeypatch: pytest.MonkeyPatch, scripted: Scripted) -> None:
    """The clock is the number of requests that were sent; nobody waits for more than 40."""
    monkeypatch.setattr(batch, "time", SimpleNamespace(monotonic=lambda: float(scripted.requests)))
    monkeypatch.setattr(batch, "_PATIENCE", 40.0)


def prompts(path: Path, *names: str) -> Path:
    return write(path, [line(name, TEXT, prompt=name) for name in names])


@pytest.mark.usefixtures("soon")
def test_what_may_be_otherwise_is_asked_again_and_what_is_refused_ends_nothing(tmp_path: Path) -> None:
    scripts = {
        "busy": [(*BUSY, {"Retry-After": "0"}), BUSY, OK],
        "away": [AWAY, (*AWAY, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}), OK],
        "page": ["<html>\nno gateway", OK],
        "ends": [None, None, OK],
        "refused": [WRONG],
        "cursed": [BROKEN],
        "text": [(200, "text")],
    }
    scripted, out = Scripted(scripts), tmp_path / "out.jsonl"
    with serving(scripted) as url:
        result = run(prompts(tmp_path / "in.jsonl", *scripts, "plain"), out, "--url", url)
    assert result.exit_code == 3, result.output
    found = answers(out)
    assert {name: one["status_code"] for name, one in found.items()} == {
        **dict.fromkeys(["busy", "away", "page", "ends", "plain"], 200),
        "refused": 400, "cursed": 503, "text": 502,
    }  # fmt: skip
    assert found["plain"]["body"] == OK[1] and found["refused"]["body"] == WRONG[1]
    assert "no JSON object" in found["text"]["body"]["error"]["message"]
    assert scripted.asked == {
        "busy": 3, "away": 3, "page": 2, "ends": 3, "refused": 1, "cursed": 5, "text": 1, "plain": 1
    }  # fmt: skip
    assert "10 prompt tokens, 15 generated" in result.stderr


@pytest.mark.usefixtures("soon")
def test_who_ends_the_server_is_found_and_the_others_have_their_answers(tmp_path: Path) -> None:
    names = [f"r{place}" for place in range(12)]
    scripted, out = Scripted({}), tmp_path / "out.jsonl"
    with serving(scripted) as url:
        result = run(prompts(tmp_path / "in.jsonl", *names[:6], "poison", *names[6:]), out, "--url", url)
    assert result.exit_code == 3, result.output
    found = answers(out)
    assert {found[name]["status_code"] for name in names} == {200} and found["poison"]["status_code"] == 502
    assert found["poison"]["body"]["error"]["code"] == "no_answer" and scripted.asked["poison"] == 5


@pytest.mark.usefixtures("soon")
def test_lines_outlive_what_takes_connections_for_a_server_that_is_away(tmp_path: Path) -> None:
    """As a tunnel does, or a container's port: it says nothing, and closes."""
    names = [f"r{place}" for place in range(12)]
    scripted, out = Scripted({}), tmp_path / "out.jsonl"
    scripted.away = range(2, 60)  # connections, of which the first is that of who asks whether it is there
    with serving(scripted) as url:
        result = run(prompts(tmp_path / "in.jsonl", *names), out, "--url", url, "--max-concurrency", "4")
    assert scripted.connections >= 60
    assert result.exit_code == 0, result.output
    assert {found["status_code"] for found in answers(out).values()} == {200} and len(answers(out)) == 12


def test_requests_in_flight_are_bounded(tmp_path: Path) -> None:
    scripted = Scripted({}, together=5)
    file, out = prompts(tmp_path / "in.jsonl", *map(str, range(40))), tmp_path / "out.jsonl"
    with serving(scripted) as url:
        assert run(file, out, "--url", url, "--max-concurrency", "5").exit_code == 0
    assert scripted.most == 5 and len(answers(out)) == 40


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("last", [AWAY, BUSY])
def test_a_server_that_answers_nothing_for_long_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: Any
) -> None:
    file, out = prompts(tmp_path / "in.jsonl", "first", "second", "third"), tmp_path / "out.jsonl"
    scripted = Scripted({"second": [last], "third": [last]})
    count_requests(monkeypatch, scripted)
    with serving(scripted) as url:
        result = run(file, out, "--url", url)
    assert result.exit_code == 1 and "no request was answered for 40 s" in result.stderr
    assert f"answered {last[0]}: {last[1]['error']['message']}. The same command goes on" in result.stderr
    assert set(answers(out)) == {"first"}
    with serving(Scripted({})) as url:
        assert run(file, out, "--url", url).exit_code == 0
    assert set(answers(out)) == {"first", "second", "third"}


def test_a_key_that_is_not_taken_any_more_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with serving(Scripted({"b": [(401, {})]})) as url:
        result = run(prompts(tmp_path / "in.jsonl", "a", "b"), out, "--url", url, "--max-concurrency", "1")
    assert result.exit_code == 1 and "it wants another key" in result.stderr and set(answers(out)) == {"a"}


def test_a_server_that_is_elsewhere_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with serving(Scripted({"b": [(307, {}, {"Location": "http://elsewhere"})]})) as url:
        result = run(prompts(tmp_path / "in.jsonl", "a", "b"), out, "--url", url, "--max-concurrency", "1")
    assert result.exit_code == 1 and "--url http://elsewhere, perhaps" in result.stderr and set(answers(out)) == {"a"}


def test_servers_that_are_none(tmp_path: Path) -> None:
    file, out = prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"

    def refusal(*words: str) -> str:
        result = run(file, out, *words)
        assert result.exit_code == 1 and result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
        assert not out.exists()
        return result.stderr

    assert "cannot be reached" in refusal("--url", "localhost:1") and "http://a b" in refusal("--url", "http://a b")
    assert "cannot be reached" in refusal("--url", "gopher://a")
    with serving(Scripted({}, models=401)) as url:
        assert "it wants another key (--api-key" in refusal("--url", url)
    with serving(Scripted({}, models=307)) as url:
        assert "--url http://elsewhere/v1/models, perhaps" in refusal("--url", url)
    with serving(Scripted({}, list_of_them=b"<html>")) as url:
        assert "/v1/models answered 200, and no JSON object" in refusal("--url", url)
    told = refusal("--url", "localhost:1", "--api-key", "sec\nret")
    assert "characters that no header can have" in told and "ret" not in told.replace("characters", "")
    assert "sec" not in refusal("--url", "localhost:1", "--api-key", " sec ")


def test_the_key_is_taken_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    file, scripted = prompts(tmp_path / "in.jsonl", "a"), Scripted({})

    def key(*words: str) -> str | None:
        assert run(file, tmp_path / f"{len(scripted.keys)}.jsonl", "--url", f"{url}/v1", *words).exit_code == 0
        return scripted.keys[-1]

    with serving(scripted) as url:
        assert key() is None
        monkeypatch.setenv("OPENAI_API_KEY", "one")
        assert key() == "Bearer one"
        monkeypatch.setenv("QUIRE_API_KEY", "two")
        assert key() == "Bearer two" and key("--api-key", "three") == "Bearer three"
        assert key("--api-key", " four\n") == "Bearer four"


def test_a_line_that_is_refused_for_long_beside_others_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    out, others, scripted = tmp_path / "out.jsonl", [str(place) for place in range(80)], Scripted({"away": [AWAY]})
    count_requests(monkeypatch, scripted)
    with serving(scripted) as url:
        result = run(prompts(tmp_path / "in.jsonl", "away", *others), out, "--url", url, "--max-concurrency", "3")
    assert result.exit_code == 3, result.output
    found = answers(out)
    assert found["away"]["status_code"] == 503 and {found[name]["status_code"] for name in others} == {200}


def test_lines_that_are_given_up_are_no_answers_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    """Else who is put off meanwhile would be given up beside them."""
    cursed = [f"cursed {place}" for place in range(40)]
    out, scripted = tmp_path / "out.jsonl", Scripted({"away": [AWAY], **{name: [BROKEN] for name in cursed}})
    count_requests(monkeypatch, scripted)
    with serving(scripted) as url:
        result = run(prompts(tmp_path / "in.jsonl", "away", *cursed), out, "--url", url, "--max-concurrency", "3")
    assert result.exit_code == 1 and "no request was answered for 40 s" in result.stderr
    assert 0 < len(answers(out)) < 40 and "away" not in answers(out)


def test_what_is_no_number_of_tokens_is_not_counted() -> None:
    tally = batch.Tally()
    for number in ("3", "true", "-5", "1.5", '"7"', "null", "9" * 400):
        usage = f'{{"prompt_tokens":{number},"completion_tokens":{number}}}'
        tally.add(batch.Answer(200, "id", b'{"usage":%s}' % usage.encode()))
    assert (tally.answers, tally.prompt_tokens, tally.output_tokens) == (7, 3, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "a", "--model", "m"], "--model is for an engine"),
        (["--url", "a", "--max-num-seqs", "4"], "--max-num-seqs is for an engine"),
        (["--url", "http://user:sesame@a"], "give the key by --api-key"),
        (["--url", "user:sesame@a:1/v1"], "give the key by --api-key"),
        (["--url", "a", "--max-concurrency", "0"], "must be 1 at least"),
        (["--api-key", "k"], "--api-key is for a server that runs"),
        (["--max-concurrency", "4"], "--max-concurrency is for a server that runs"),
    ],
)
def test_options_of_the_other_way_are_refused(tmp_path: Path, words: list[str], told: str) -> None:
    result = run(prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl", *words)
    assert result.exit_code == 2 and told in " ".join(result.stderr.replace("│", " ").split())
    assert "sesame" not in result.stderr


def test_variables_of_other_commands_are_no_options_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "QUIRE_MODEL", "/nothing/here")
    with serving(Scripted({})) as url:
        assert run(prompts(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl", "--url", url).exit_code == 0
