"""`quire top`: one picture for scripts, and pictures on a terminal, whatever its server does."""

from __future__ import annotations

import os
import re
import signal
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quire.cli import top_live
from quire.cli.app import app
from tests.cli.commands import fresh
from tests.cli.events_server import Asked, answering, event, state, telling
from tests.cli.test_run import Terminal
from tests.server.api_server import ServerProcess

pytestmark = pytest.mark.slow

LEFT = "\x1b[?1049l"  # the shell's screen again


def once(*args: str, **environment: str | None) -> Result:
    return CliRunner().invoke(app, ["top", *args], env={"COLUMNS": "90", "OPENAI_API_KEY": None, **environment})


# -- one picture --------------------------------------------------------------------------------------------------


def test_one_picture_is_printed() -> None:
    with answering(telling(state())) as url:
        for args in ((url, "--once"), ("--url", f"{url}/v1", "--once"), (url,)):  # the output is no terminal
            result = once(*args)
            assert result.exit_code == 0 and result.stderr == ""
            lines = result.stdout.splitlines()
            assert lines[0] == f"quire 0.9.1  quire-demo  bfloat16  cpu  up 1m01  {url}/v1"[:90]
            assert lines[3] == "CCCC" + "c" * 8 + "░" * 8 + "d" * 12 + "·" * 32
            assert "\x1b" not in result.stdout and max(map(len, lines)) <= 90


def test_requests_of_a_server_are_seen(demo: ServerProcess) -> None:
    """Its route and this picture mean the same."""
    ended = threading.Event()

    def ask() -> None:
        with demo.client() as client:
            while not ended.is_set():
                client.completions.create(
                    model="french", prompt="Once", max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
                )

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(100):
            result = once(demo.url, "--once", "--rate", "10")
            assert result.exit_code == 0, result.output
            if found := re.search(r"^([a-z]) (\d+) +running +french ", result.stdout, re.MULTILINE):
                break
        else:
            raise AssertionError(result.stdout)
    finally:
        ended.set()
        thread.join()
    letter, number = found.groups()
    assert letter == chr(ord("a") + int(number) % 26)
    assert re.search(rf"^[·░A-Za-z]*{letter}", result.stdout, re.MULTILINE | re.IGNORECASE)
    assert "steps last: " in result.stdout and re.search(r"^french +(device|host) ", result.stdout, re.MULTILINE)


def test_all_of_long_lists_is_printed() -> None:
    requests = [{"number": i + 2, "state": "running"} for i in range(200)]
    with answering(telling(state(requests=requests))) as url:
        assert once(url, "--once").stdout.count(" running ") == 200


def test_a_pipe_without_unicode_gets_none() -> None:
    with answering(telling(state())) as url:
        result = fresh("top", url, "--once", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii() and "CCCC" + "c" * 8 + "-" * 8 + "d" * 12 in result.stdout


def wrong_key(asked: Asked) -> None:
    if asked.key == "Bearer right":
        telling(state())(asked)
    asked.begin(401, "application/json")
    asked.send(b'{"error": {"message": "a key is asked for"}}')


def test_a_wrong_key_is_one_line() -> None:
    with answering(wrong_key) as url:
        for args in ((url,), (url, "--api-key", "wrong")):
            result = once(*args, "--once")
            assert result.exit_code == 1 and result.stdout == ""
            assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
            assert "answered 401: a key is asked for (--api-key KEY, or OPENAI_API_KEY)" in result.stderr
        assert once(url, "--api-key", "right").exit_code == 0
        assert once(url, OPENAI_API_KEY="right").exit_code == 0


def test_where_nothing_answers_that_is_one_line() -> None:
    with answering(telling()) as url:
        pass
    result = once(url, "--once")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert f"{url}/v1 cannot be reached" in result.stderr and "(quire serve)" in result.stderr


def test_a_server_that_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_live, "_FIRST", 0.2)

    def silent(asked: Asked) -> None:
        asked.ends.wait()

    def idle(asked: Asked) -> None:
        asked.begin()
        asked.stay()

    for answer in (silent, idle):
        with answering(answer) as url:
            result = once(url)
        assert result.exit_code == 1 and "sent no event in" in result.stderr


@pytest.mark.parametrize("rate", ["0", "11", "many"])
def test_a_rate_out_of_bounds_is_refused(rate: str) -> None:
    assert once("--rate", rate).exit_code == 2


def test_texts_of_the_server_do_not_command_the_terminal() -> None:
    bad = "\x1b]0;owned\x07\x1b[2J[red]"
    given = state(adapters=[{"name": bad, "tier": bad}], engine={"model": bad})
    with answering(telling(given)) as url:
        result = once(url)
    assert result.exit_code == 0 and "[red]" in result.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.stdout)


# -- on a terminal ------------------------------------------------------------------------------------------------


def terminal(
    url: str, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int] = (100, 30), **variables: str
) -> Terminal:
    for name, value in {"TERM": "xterm", "LC_ALL": "C.UTF-8", **variables}.items():
        monkeypatch.setenv(name, value)
    for name in {"COLUMNS", "LINES", "NO_COLOR", "COLORTERM", "OPENAI_API_KEY"} - set(variables):
        monkeypatch.delenv(name, raising=False)
    return Terminal("top", url, size=size)


def test_a_picture_is_held_until_q(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(state())) as url:
        one = terminal(url, monkeypatch)
        seen = one.read_until("p pause")
        assert "\x1b[?1049h" in seen and "requests" in seen and "\x1b[32m" in seen
        one.type("c")
        one.read_until("by .{0,20}request|\x1b\\[2mrequest")
        one.type("p")
        one.read_until("paused")
        one.type("xyz\x1b[A")  # nothing
        one.type("p")
        one.read_until("pause")
        one.type("\x0c")
        one.read_until("quire 0.9.1(.|\n)*p pause")
        one.type("q")
        one.read_until(re.escape(LEFT))
        assert one.end() == 0


def test_ctrl_c_leaves_and_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(state())) as url:
        one = terminal(url, monkeypatch)
        before = termios.tcgetattr(one.fd)
        one.read_until("p pause")
        assert not termios.tcgetattr(one.fd)[3] & termios.ECHO
        one.interrupt()
        rest = one.read_until(re.escape(LEFT))
        assert "Traceback" not in rest and "\x1b[?25h" in rest
        assert one.process.wait(30) == 0
        assert termios.tcgetattr(one.fd)[3] == before[3]
        assert one.end() == 0


def test_ctrl_z_lends_the_terminal_to_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(state())) as url:
        one = terminal(url, monkeypatch)
        one.read_until("p pause")
        one.process.send_signal(signal.SIGTSTP)
        one.read_until(re.escape(LEFT))
        assert os.WIFSTOPPED(os.waitpid(one.process.pid, os.WUNTRACED)[1])
        one.process.send_signal(signal.SIGCONT)
        one.read_until("p pause")
        one.process.terminate()
        one.read_until(re.escape(LEFT))
        assert one.end() == 128 + signal.SIGTERM


def test_another_size_is_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(state())) as url:
        one = terminal(url, monkeypatch)
        one.read_until("cached.*computed(.|\n)*p pause")
        termios.tcsetwinsize(one.fd, (20, 40))
        seen = one.read_until("p pause|p pa…")
        assert "prompt" in seen and "computed" not in seen
        termios.tcsetwinsize(one.fd, (1, 2))
        one.read_until("q…")
        termios.tcsetwinsize(one.fd, (30, 100))
        one.read_until("cached.*computed(.|\n)*p pause")
        one.type("q")
        assert one.end() == 0


@pytest.mark.parametrize("name", ["xterm-256color", "vt100"])
def test_without_colours_owners_are_letters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(state())) as url:
        one = terminal(url, monkeypatch, TERM=name, NO_COLOR="1")
        seen = one.read_until("p pause")
        assert "CCCCcccccccc" in seen and not re.search(r"\x1b\[(\d+;)*[349]\dm", seen)
        assert "colours by" not in seen
        one.type("q")
        assert one.end() == 0


@pytest.mark.parametrize("name", ["dumb", "unknown", ""])
def test_a_terminal_without_a_cursor_gets_one_picture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(state())) as url:
        one = terminal(url, monkeypatch, TERM=name)
        seen = one.read_until("pinned.*\n.*\n.*\n")
        assert "requests" in seen and "?1049h" not in seen
        assert one.end() == 0


class Comings:
    """A server's answers: at first states, then the connection ends, then none until `back`, then another model's."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.back = threading.Event()

    def __call__(self, asked: Asked) -> None:
        if not self.gone.is_set():
            asked.begin()
            asked.send(event(state()))
            self.gone.wait()
        elif not self.back.is_set():
            asked.begin(503, "application/json")
            asked.send(b'{"error": {"message": "not \\u001b[2J yet"}}')
        else:
            telling(state(engine={"model": "another"}))(asked)


def test_a_server_may_go_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    comings = Comings()
    with answering(comings) as url:
        one = terminal(url, monkeypatch, (150, 30))
        one.read_until("quire-demo(.|\n)*p pause")
        comings.gone.set()
        seen = one.read_until("answered 503: not �")
        assert "gone for" in seen and "\x1b[2J" not in seen
        comings.back.set()
        one.read_until("another(.|\n)*p pause")
        one.type("q")
        assert one.end() == 0


def test_a_server_that_is_gone_for_good_leaves_the_last_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def answer(asked: Asked) -> None:
        asked.begin()
        asked.send(event(state()))
        ended.wait()

    with answering(answer) as url:
        one = terminal(url, monkeypatch, (150, 30))
        one.read_until("quire-demo(.|\n)*p pause")
        ended.set()
    one.read_until("gone for .*refused")
    one.type("q")
    assert one.end() == 0


def test_at_first_a_server_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling()) as url:
        pass
    one = terminal(url, monkeypatch)
    assert "?1049h" not in one.read_until("cannot be reached")
    assert one.end() == 1


def test_a_terminal_that_is_not_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pseudo terminal holds, and nobody reads; once somebody does, the newest picture comes."""
    counted = 0

    def answer(asked: Asked) -> None:
        nonlocal counted
        asked.begin()
        while not asked.ends.is_set():
            counted += 1
            rows = [{"number": counted % 1000 + i, "state": "running", "adapter": str(counted)} for i in range(200)]
            asked.send(event(state(requests=rows, engine={"model": "last" if counted > 300 else "m"})))
            asked.ends.wait(0.01)

    with answering(answer) as url:
        one = terminal(url, monkeypatch, (200, 200))
        while counted < 400:
            time.sleep(0.01)
        one.read_until("last")
        one.interrupt()
        one.read_until(re.escape(LEFT))
        assert one.end() == 0


HOSTILE: dict[str, Callable[[], Any]] = {
    "numbers": lambda: state(time=1e308, pools=[{"total": 10**300, "map": [[10**400, 2, 10**50], [-5, -5, -5]]}]),
    "kinds": lambda: {name: name for name in state()},
    "wide": lambda: state(adapters=[{"name": "日本" * 50, "tier": "\u0301" * 80}]),
    "many": lambda: state(requests=[{"number": i, "state": f"s{i}"} for i in range(5000)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_states_leave_the_picture_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(telling(HOSTILE[name](), state())) as url:
        one = terminal(url, monkeypatch)
        assert "Traceback" not in one.read_until("quire-demo")
        one.type("q")
        assert one.end() == 0


def test_a_frame_takes_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole picture once; then what changes."""
    more = threading.Event()

    def answer(asked: Asked) -> None:
        asked.begin()
        asked.send(event(state()))
        more.wait()
        pool = {**state()["pools"][0], "map": [[4, 2, 2], [9, 2, 1], [7, 1, 0], [12, 3, 1], [32, 0, 0]], "cached": 7}
        asked.send(event(state(pools=[pool], steps=[])))
        asked.stay()

    with answering(answer) as url:
        one = terminal(url, monkeypatch)
        assert len(one.read_until("p pause")) > 1000
        more.set()
        assert len(one.read_until(re.escape("█"))) < 100
        one.type("q")
        assert one.end() == 0
