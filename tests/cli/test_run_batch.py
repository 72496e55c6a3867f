"""`quire run-batch`: the server's answers, in a file that can be gone on with."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from quire.cli.app import app
from tests.server.api_server import ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["run-batch", *map(str, args)])


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """By custom_id, which each has once; every line has the batch API's form."""
    found: dict[str, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        answer = json.loads(text)
        assert set(answer) == {"id", "custom_id", "response", "error"} and answer["error"] is None
        assert set(answer["response"]) == {"status_code", "request_id", "body"}
        assert answer["custom_id"] not in found
        found[answer["custom_id"]] = answer["response"]
    return found


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


BATCH = [
    line("plain", **said("There is a red star. What color is the star?")),
    line("drawn", **said("There is a red star. What color is the star?", seed=7, temperature=1.0, n=3)),
    line("adapter", **said("There is a red star. What color is the star?", model="french", logprobs=True)),
    line("picture", **said([picture(), {"type": "text", "text": "What do you see?"}])),  # type: ignore[arg-type]
    line("text", TEXT, prompt=["Once", "Twice"], max_tokens=5, seed=3, temperature=0.8),
    line("message", "/v1/messages", **said("There is a red star. What color is the star?", stop_sequences=["."])),
    line("items", "/v1/responses", input="There is a red star. What color is the star?", temperature=0),
    line("no message", "/v1/messages", messages=[]),
    line("no field", **said("Hello", temperatur=1)),
    line("no model", **said("Hello", model="nobody")),
    line("ünïcödé \U0001f426\n", TEXT, prompt="“ünïcödé” \U0001f426", max_tokens=3, temperature=0),
]


NAMES_AND_TIMES = {"id", "created", "created_at", "completed_at", "request_id"}


def comparable(body: Any) -> Any:
    """Without names and times, and with a prompt's tokens in one number: others left some in the prefix cache."""
    if isinstance(body, list):
        return [comparable(one) for one in body]
    if not isinstance(body, dict):
        return body
    kept = {name: comparable(value) for name, value in body.items() if name not in NAMES_AND_TIMES}
    if "input_tokens" in kept:
        kept["input_tokens"] += kept.pop("cache_read_input_tokens", 0)
    return {
        name: value for name, value in kept.items() if name not in ("prompt_tokens_details", "input_tokens_details")
    }


def test_the_answers_are_the_servers(demo: ServerProcess, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    result = run(file, out)
    assert result.exit_code == 3, result.output  # two of them are errors
    assert "11 of 11 requests are answered" in result.stderr and "8 with 200, 2 with 400, 1 with 404" in result.stderr
    found = answers(out)
    assert list(sorted(found)) == sorted(one["custom_id"] for one in BATCH)
    with demo.http() as client:
        for one in BATCH:
            expected = client.post(one["url"], json=one["body"])
            answer = found[one["custom_id"]]
            assert answer["status_code"] == expected.status_code
            assert comparable(answer["body"]) == comparable(expected.json()), one["custom_id"]


def test_it_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    requests = [line(f"r{place}", TEXT, prompt=f"Once {place}", max_tokens=2, temperature=0) for place in range(6)]
    file, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert run("-i", file, "-o", out).exit_code == 0
    whole = answers(out)
    kept = out.read_text().splitlines(keepends=True)
    out.write_text("".join(kept[:3]) + kept[3][:40])
    result = run(file, out)
    assert result.exit_code == 0 and "6 requests, 3 of them answered before" in result.stderr
    assert out.read_text().startswith("".join(kept[:3]))
    again = answers(out)
    assert {name: comparable(one["body"]) for name, one in again.items()} == {
        name: comparable(one["body"]) for name, one in whole.items()
    }

    out.write_text(out.read_text().rstrip("\n"))  # a last line that is whole but for its end
    result = run(file, out)
    assert result.exit_code == 0 and "loading" not in result.stderr
    assert answers(out) == again and out.read_text().endswith("\n")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["{"], "line 1 is refused"),
        (["", "[]"], "line 2 is no JSON object"),
        ([line("a"), line("b"), line("a")], "line 3 has the custom_id 'a' of line 1"),
        ([{"method": "POST", "url": CHAT, "body": {}}], "line 1 has no custom_id"),
        ([{**line("a"), "custom_id": 7}], "custom_id must be a text"),
        ([{**line("a"), "method": "GET"}], "method must be POST"),
        ([line("a", "/v1/files")], "url must be one of /v1/chat/completions, "),
        ([{**line("a"), "body": []}], "body must be an object"),
        ([{**line("a"), "priority": 1}], "there is no such key"),
        ([line("a", "/v1/responses", input="a", background=True)], "body.background: nobody could ask"),
        ([line("a", stream=True)], "body.stream: answers of a batch come whole"),
        ([json.dumps(line("a")).replace("{}", '{"temperature": 1e999}')], "line 1 is refused"),
        (["x" * 2000], "line 1 is refused"),
        (["x"] * 20, "; and more. Nothing was begun."),
    ],
)
def test_a_file_with_a_fault_is_refused_before_anything_begins(tmp_path: Path, lines: list[Any], told: str) -> None:
    file, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = run(file, out, "--model", "/nothing/here")  # which is never looked for
    assert result.exit_code == 1 and result.stderr.count("error: ") == 1
    assert told in result.stderr and "Nothing was begun" in result.stderr
    assert not out.exists()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [line("a", TEXT, prompt="x")])

    def refusal(*args: object) -> str:
        result = run(*args)
        assert result.exit_code == 1, result.output
        return result.stderr

    assert "cannot be read" in refusal(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    assert "cannot be written" in refusal(file, tmp_path / "none" / "out.jsonl")
    assert "is the file of the requests" in refusal(file, file)
    assert "IN is" in refusal(file, tmp_path / "out.jsonl", "-i", tmp_path / "other.jsonl")
    assert "--max-request-bytes" in refusal(
        write(tmp_path / "long.jsonl", ["x" * 70_000]), tmp_path / "out.jsonl", "--max-request-bytes", "100"
    )
    for text in ("precious", "precious\n", '{"custom_id": "a"}\n', '{"id":"other","custom_id":"a","response":{}}\n'):
        other = tmp_path / "precious.txt"
        other.write_text(text)
        assert "line 1 is no answer" in refusal(file, other)
        assert other.read_text() == text
    assert run(file).exit_code == 2 and run().exit_code == 2


def test_answers_to_other_requests_of_the_same_names(tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", [line("a", TEXT, prompt="x", max_tokens=1)]), tmp_path / "out.jsonl"
    assert run(file, out).exit_code == 0
    before = out.read_text()
    write(file, [line("b", TEXT, prompt="x", max_tokens=1), line("a", TEXT, prompt="y", max_tokens=1)])
    result = run(file, out)
    assert result.exit_code == 1 and "(the first is number 2)" in result.stderr and out.read_text() == before
    write(file, [line("b", TEXT, prompt="x", max_tokens=1)])
    result = run(file, out)
    assert result.exit_code == 0 and "1 answers" in result.stderr and "are to no request" in result.stderr
    assert set(answers(out)) == {"a", "b"}


def test_a_file_that_another_run_writes_to(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    file, out = write(tmp_path / "in.jsonl", [line("a", TEXT, prompt="x")]), tmp_path / "out.jsonl"
    with open(out, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = run(file, out)
    assert result.exit_code == 1 and "another run-batch" in result.stderr


def test_ctrl_c_ends_it_in_order_and_the_same_command_goes_on(tmp_path: Path, foreground: None) -> None:
    first = line("first", TEXT, prompt="Once", max_tokens=1)
    long = [line(f"long {place}", TEXT, prompt="Once", max_tokens=400, ignore_eos=True) for place in range(40)]
    file, out = write(tmp_path / "in.jsonl", [first, *long]), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quire", "run-batch", str(file), str(out), "--max-num-seqs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as it:
        end = time.monotonic() + 120
        while not (out.exists() and out.read_bytes().endswith(b"\n")):
            assert time.monotonic() < end and it.poll() is None
            time.sleep(0.01)
        it.send_signal(signal.SIGINT)
        _, told = it.communicate(timeout=60)
    assert it.returncode == 130, told
    assert "stopped: the same command goes on with the rest" in told and "Traceback" not in told
    found = answers(out)
    assert "first" in found and len(found) < 41

    write(file, [first, *(one for one in long if one["custom_id"] in found)])
    result = run(file, out)
    assert result.exit_code == 0 and "loading" not in result.stderr
