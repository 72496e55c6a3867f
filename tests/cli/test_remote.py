"""`quire chat` and `quire complete`: what they print is what the server answers, and what goes wrong is one line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import Result
from openai import OpenAI
from typer.testing import CliRunner

from quire.cli.address import api_url
from quire.cli.app import app
from quire.demo import picture_path
from tests.cli.test_run import PROMPT, Terminal
from tests.server.api_server import ServerProcess

pytestmark = pytest.mark.slow

QUESTION = "There is a red star. What color is the star?"
GREEDY = ("--temperature", 0)


def command(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def answered(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def said(client: OpenAI, *turns: str, model: str = "quire-demo", **more: object) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    answer = client.chat.completions.create(model=model, messages=messages, **more)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("host/deep/v1", "http://host/deep/v1"),
    ],
)
def test_an_address_may_be_short(given: str, url: str) -> None:
    assert api_url(given) == url


def test_a_question_is_answered(demo: ServerProcess, client: OpenAI) -> None:
    expected = said(client, QUESTION, temperature=0) + "\n"
    assert answered(command("chat", demo.url, "-q", QUESTION, *GREEDY)) == expected
    assert answered(command("chat", "--url", demo.url + "/v1", "--quick", QUESTION, *GREEDY)) == expected
    assert answered(command("chat", demo.url, "--model-name", "quire-demo", *GREEDY, stdin=QUESTION + "\n")) == expected


def test_a_conversation_remembers(demo: ServerProcess, client: OpenAI) -> None:
    first = said(client, QUESTION, temperature=0)
    second = said(client, QUESTION, first, "And now?", temperature=0)
    turns = "And now?\n/reset\n" + QUESTION + "\n/exit\nnever\n"
    out = answered(command("chat", demo.url, QUESTION, *GREEDY, stdin=turns))
    assert out == f"{first}\n{second}\n{first}\n"


def test_settings_go_to_the_server(demo: ServerProcess, client: OpenAI) -> None:
    options = ("--temperature", 1, "--top-p", 0.9, "--seed", 7, "--max-tokens", 2)
    expected = said(client, QUESTION, temperature=1, top_p=0.9, seed=7, max_tokens=2)
    result = command("chat", demo.url, "-q", QUESTION, *options, "--verbose")
    assert answered(result) == expected + "\n"
    assert result.stderr.startswith("2 tokens, ") and "cut off by the length limit" in result.stderr
    messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="quire-demo", messages=messages, temperature=0)
    expected = answer.choices[0].message.content
    assert answered(command("chat", demo.url, "-q", QUESTION, "--system-prompt", "Hm.", *GREEDY)) == f"{expected}\n"


def test_pictures_and_adapters(demo: ServerProcess) -> None:
    look = f"/image {picture_path()}\nWhat do you see?\n"
    lines = f"{look}/lora shout\n/reset\n{look}"
    plain, loud = answered(command("chat", demo.url, *GREEDY, stdin=lines)).splitlines()
    assert "red circle" in plain and "RED CIRCLE" in loud
    options = ("-i", picture_path(), "-q", "What do you see?", *GREEDY)
    assert "red circle" in answered(command("chat", demo.url, *options))
    assert "RED CIRCLE" in answered(command("chat", demo.url, "--model", "shout", *options))


def test_a_text_is_continued(demo: ServerProcess, client: OpenAI) -> None:
    expected = client.completions.create(model="quire-demo", prompt="Once upon", max_tokens=9, temperature=0)
    options = ("--max-tokens", 9, "--temperature", 0)
    for result in (
        command("complete", demo.url, "Once upon", *options),
        command("complete", "--url", demo.url, "-q", "Once upon", *options),
        command("complete", demo.url, *options, stdin="Once upon\n"),
        command("complete", demo.url, "-", *options, stdin="Once upon\n"),
    ):
        assert answered(result) == expected.choices[0].text + "\n"


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        (("chat", "URL", "-q", "x", "--model-name", "absent"), None, "answered 404: model: there is no 'absent'"),
        (("chat", "URL", "-q", "x", "--temperature", "-1"), None, "answered 400: temperature"),
        (("chat", "URL"), "a\n/lora absent\nb\n", "'absent'"),
        (("chat", "URL"), "/lora\n", "There are base, quire-demo"),
        (("chat", "URL", "-i", "/nowhere.png", "-q", "x"), None, "/nowhere.png: No such file"),
        (("chat", "127.0.0.1:1", "-q", "x"), None, "cannot be reached"),
        (("chat", "http://[", "-q", "x"), None, "http://["),
        (("chat", "URL", "--url", "http://other", "-q", "x"), None, "give one of them"),
        (("complete", "URL", "x" * 9000), None, "answered 400"),
        (("complete", "URL"), "", "no prompt"),
    ],
)
def test_an_error_is_one_line(demo: ServerProcess, args: tuple[str, ...], stdin: str | None, message: str) -> None:
    result = command(*(demo.url if word == "URL" else word for word in args), stdin=stdin)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


# -- servers that are not quire -----------------------------------------------------------------------------------


class _Odd(BaseHTTPRequestHandler):
    """Lists no models; answers by what it was asked: breaks off, says an error in the stream, is no such API, or
    goes on without an end."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        if text == "html":
            self.send_error(502)
            return
        if text == "key":
            self._send(401, json.dumps({"error": {"message": "a key is needed"}}).encode())
            return
        if text == "endless":
            self._send_without_end()
            return
        piece = {"choices": [{"index": 0, "delta": {"content": "half \x1b[2J"}, "finish_reason": None}]}
        events = [piece, {"error": {"message": "the card fell out"}}] if text == "error" else [piece]
        self._send(200, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events), text == "cut")

    def _send_without_end(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with suppress(OSError):  # the client goes
            while True:
                event = {"choices": [{"index": 0, "delta": {"content": "words "}, "finish_reason": None}]}
                self.wfile.write(b"data: %s\n\n" % json.dumps(event).encode())
                time.sleep(0.02)

    def _send(self, status: int, data: bytes, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if status == 200 else "application/json")
        self.send_header("Content-Length", str(len(data) + 50 * cut))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_ctrl_c_ends_the_answer_only(odd: str) -> None:
    terminal = Terminal("chat", odd, "--model-name", "any")
    terminal.read_until(PROMPT)
    for _ in range(2):
        terminal.type("endless\n")
        terminal.read_until("endless\r?\n(.|\n)*words words")
        terminal.interrupt()
        assert "interrupted" in terminal.read_until(PROMPT)
    terminal.type("/exit\n")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("html", "answered 502: Bad Gateway"),
        ("key", "answered 401: a key is needed (--api-key KEY, or OPENAI_API_KEY)"),
        ("error", "the card fell out"),
        ("ends", "the answer broke off"),
        ("cut", "the answer broke off"),
    ],
)
def test_a_server_that_fails_is_one_line(odd: str, asked: str, message: str) -> None:
    result = command("chat", odd, "--model-name", "any", "-q", asked)
    assert result.exit_code == 1 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_server_without_a_list_needs_a_name(odd: str) -> None:
    assert "answered 404" in command("chat", odd, "-q", "x").stderr


def test_a_servers_text_does_not_command_the_terminal(odd: str, tmp_path: Path) -> None:
    terminal = Terminal("chat", odd, "--model-name", "any", "-q", "ends")
    assert "\x1b[2J" not in terminal.read_until("broke off")
    assert terminal.end() == 1
