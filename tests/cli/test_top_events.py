"""Server-sent events as `quire top` reads them, from servers that mean well and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli import top_events
from quire.cli.top_events import Seen, Watch, events
from quire.errors import QuireError
from tests.cli.events_server import Asked, answering, event, state, telling

STREAM = b"".join(
    (
        b": hello\n\n",
        b"event: state\ndata: one\n\n",
        b"event: state\r\ndata: t\xc3\xa4o\r\n\r\n",
        b"data:three\rdata: lines\r\r",
        b"id: 7\nevent: other\ndata: {}\nretry: 5\n\n",
        b"event: nothing\n\n",
        b"event: state\ndata: not ended",
    )
)
MEANT = [("state", "one"), ("state", "täo"), ("", "three\nlines"), ("other", "{}")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_are_read_wherever_parts_end(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    assert list(events(STREAM[a:b] for a, b in pairwise(ends))) == MEANT


@given(st.lists(st.binary(max_size=50)))
def test_any_bytes_are_read(parts: list[bytes]) -> None:
    for name, data in events(parts):
        assert isinstance(name, str) and data is not None


def test_a_line_in_many_parts_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    lines = top_events._lines

    def counted(text: bytes) -> list[bytes]:
        read.append(len(text))
        return lines(text)

    monkeypatch.setattr(top_events, "_lines", counted)
    parts = [b"data: ", *[b"x"] * 5000, b"\n\n"]
    assert list(events(parts)) == [("", "x" * 5000)] and sum(read) < 2 * 5008


@pytest.mark.parametrize("part", [b"a" * 1000, b"data: a\n" * 100, b":\n" * 500])
def test_an_event_without_an_end_is_given_up(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_events, "_LONGEST", 50_000)
    with pytest.raises(QuireError, match="has no end"):
        list(events(iter(lambda: part, None)))


# -- watching a server --------------------------------------------------------------------------------------------


@contextmanager
def watched(url: str, key: str | None = None) -> Iterator[Watch]:
    watch = Watch(f"{url}/v1", key, 4)
    try:
        yield watch
    finally:
        watch.stop()


def first(answer: Callable[[Asked], None], key: str | None = None) -> Seen:
    with answering(answer) as url, watched(url, key) as watch:
        return watch.wait(30)


def test_a_state_is_seen() -> None:
    seen = first(telling(state()))
    assert seen.state is not None and seen.state.model == "quire-demo"
    assert seen.problem is None


def test_the_key_and_the_rate_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def answer(one: Asked) -> None:
        asked.append((one.path, one.key))
        telling(state())(one)

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    first(answer)
    first(answer, "k1")
    monkeypatch.setenv("OPENAI_API_KEY", "k2")
    first(answer)
    path = "/v1/engine/events?rate=4"
    assert asked == [(path, None), (path, "Bearer k1"), (path, "Bearer k2")]


def refusing(status: int, body: bytes, kind: str = "application/json") -> Callable[[Asked], None]:
    def answer(asked: Asked) -> None:
        asked.begin(status, kind)
        asked.send(body)

    return answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refusing(401, b'{"error": {"message": "no such key"}}'), r"answered 401: no such key \(--api-key"),
        (refusing(404, b'{"detail": "Not Found"}'), "answered 404: Not Found .*which server"),
        (refusing(429, b'{"error": {"message": "16 watch already"}}'), "answered 429: 16 watch already$"),
        (refusing(500, b"<html>"), "answered 500: Internal Server Error$"),
        (refusing(500, b"[" * 5000), "answered 500: Internal Server Error$"),
        (refusing(500, b'{"error": [1]}'), "answered 500: Internal Server Error$"),
        (refusing(500, b'{"error": "\\u001b[2J' + b"x" * 1000 + b'"}'), "answered 500: �\\[2Jx+"),
        (refusing(200, b"{}"), "answered application/json and no events"),
        (refusing(200, b"<html>", "text/html"), "answered text/html and no events"),
        (refusing(200, b"event: state\ndata: {\n\n", "text/event-stream"), "are no JSON"),
        (refusing(200, b"event: state\ndata: [1]\n\n", "text/event-stream"), "no JSON objects"),
        (
            refusing(200, b'event: error\ndata: {"error": {"message": "no more"}}\n\n', "text/event-stream"),
            "ended: no more",
        ),
        (refusing(200, b"event: error\ndata: ?\n\n", "text/event-stream"), "ended: the server has a fault"),
        (refusing(200, b"event: other\ndata: {}\n\n", "text/event-stream"), "broke off"),
        (refusing(200, b"", "text/event-stream"), "broke off"),
    ],
)
def test_what_a_server_answers_otherwise_is_said(answer: Callable[[Asked], None], says: str) -> None:
    seen = first(answer)
    assert seen.state is None
    with pytest.raises(QuireError, match=says):
        raise seen.problem or AssertionError


def test_the_key_goes_to_no_other_server() -> None:
    keys: list[str | None] = []

    def elsewhere(asked: Asked) -> None:
        keys.append(asked.key)
        telling(state())(asked)

    with answering(elsewhere) as other:

        def answer(asked: Asked) -> None:
            asked.begin(307, Location=f"{other}/v1/engine/events")

        seen = first(answer, "secret")
    assert "answered 307" in str(seen.problem) and keys == []


@pytest.mark.parametrize("line", [b"x" * 1000, b"data: x\n" * 100])
def test_a_stream_without_an_end_is_given_up(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_events, "_LONGEST", 100_000)

    def answer(asked: Asked) -> None:
        asked.begin()
        while not asked.ends.is_set():
            asked.send(line)

    assert "has no end" in str(first(answer).problem)


def test_headers_without_an_end_are_given_up() -> None:
    def answer(asked: Asked) -> None:
        asked.send(b"HTTP/1.1 200 OK\r\n")
        while not asked.ends.is_set():
            asked.send(b"X-More: x\r\n" * 100)

    assert "cannot be reached" in str(first(answer).problem)


def test_a_server_that_went_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_events, "_AGAIN", 0.01)
    times = iter([(61.5, "a"), (70.0, "a"), (5.0, "b")])

    def answer(asked: Asked) -> None:
        seconds, model = next(times, (None, ""))
        if seconds is None:
            asked.stay()
        asked.begin()
        asked.send(event(state(time=seconds, engine={"model": model})))

    seen: list[Seen] = []
    tell = Watch._tell
    monkeypatch.setattr(Watch, "_tell", lambda self, one: (seen.append(one), tell(self, one)))
    with answering(answer) as url, watched(url) as watch:
        while watch.wait(60, count=3).count < 3:
            assert watch.silence() < 60
    assert any(one.problem and one.state for one in seen)
    # The third is another engine's: the steps before are not.
    assert {one.count: len(one.steps) for one in seen if one.count}[3] == 2


def test_nobody_there_is_said() -> None:
    with answering(telling()) as url:
        pass
    with watched(url) as watch:
        assert "cannot be reached" in str(watch.wait(30).problem)


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        ("file:///etc/passwd", None, "begins with http"),
        ("ftp://host", None, "begins with http"),
        ("http://host", "a\nX: b", "the key has characters"),
        ("http://host", "schlüssel", "the key has characters"),
    ],
)
def test_an_address_or_a_key_that_is_none_is_refused(url: str, key: str | None, says: str) -> None:
    with pytest.raises(QuireError, match=says) as error:
        Watch(url, key, 4)
    assert not key or key not in str(error.value)


@pytest.mark.parametrize("url", ["http://host:port", "http://[::1", "http://a b", "http://u:secret@localhost:1"])
def test_an_address_that_cannot_be_read_is_one_line(url: str) -> None:
    try:
        with watched(url) as watch:
            problem: QuireError | None = watch.wait(30).problem
    except QuireError as error:
        problem = error
    assert problem and "\n" not in str(problem)
