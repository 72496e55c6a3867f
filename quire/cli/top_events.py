"""The events of a server's GET /v1/engine/events: read in a thread, and asked for again where they end."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.cli.top_state import State, Step, clean, read_state
from quire.errors import QuireError

PATH = "/engine/events"

_SILENCE = 30.0  # seconds for a connection, and between two bytes: an idle server sends a comment every ten
_AGAIN = 1.0  # seconds until a server that went away is asked again
_LONGEST = 8 << 20  # bytes of an event, of which the map of a pool in pieces takes most
_LONGEST_ERROR = 4096
_LONGEST_MESSAGE = 400
_STEPS = 512  # kept of those that were seen


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named, and for no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Seen:
    """What is known of a server at some time.

    state: None before the first event; steps: the last ones, oldest first; problem: why no events come now; count:
    how many have come.
    """

    state: State | None
    steps: tuple[Step, ...]
    problem: QuireError | None
    count: int


def events(parts: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event, data) of each server-sent event in a stream that comes in any parts. Raises QuireError without an end."""
    held, name, data = [b""], "", []
    size = begun = 0  # bytes of whole lines, and of the one that has begun
    for part in parts:
        held.append(part)
        begun += len(part)
        if begun + size <= _LONGEST and not (held[0].endswith(b"\r") or b"\n" in part or b"\r" in part):
            continue  # a long line that comes in many parts is put together once
        # A carriage return at a part's end may be half of a line's end: it waits for what follows.
        *lines, rest = _lines(b"".join(held))
        held, begun = [rest], len(rest)
        for line in lines:
            size += len(line)
            if line:
                field, _, value = line.decode("utf-8", "replace").partition(":")
                value = value.removeprefix(" ")
                name = value if field == "event" else name
                data += [value] if field == "data" else []
                continue
            if data:
                yield name, "\n".join(data)
            name, data, size = "", [], 0
        if size + begun > _LONGEST:
            raise QuireError(f"the server's event has no end: {_LONGEST} bytes of it are here.")


def _lines(text: bytes) -> list[bytes]:
    """Lines ended by \\n, \\r or \\r\\n, and what follows the last end."""
    if b"\r" not in text:
        return text.split(b"\n")
    tail = b"\r" if text.endswith(b"\r") else b""
    lines = text.removesuffix(tail).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    lines[-1] += tail
    return lines


class Watch:
    """Reads a server's events until `stop`, in a thread of its own; the server may go and come back.

    url: the API's, as `address.api_url` makes it. rate: events a second. Raises QuireError where url or key are none.
    """

    def __init__(self, url: str, key: str | None, rate: float) -> None:
        self.url = url
        self._request = _request(url, key or os.environ.get("OPENAI_API_KEY"), rate)
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._steps: deque[Step] = deque(maxlen=_STEPS)
        self._seen = Seen(None, (), None, 0)
        self._heard = time.monotonic()
        self._ends = threading.Event()
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="events", daemon=True).start()

    def stop(self) -> None:
        self._ends.set()

    def seen(self) -> Seen:
        return self._seen

    def silence(self) -> float:
        """Seconds since the server was heard: an engine in which nothing happens sends no events, but signs of life."""
        return time.monotonic() - self._heard

    def wait(self, seconds: float, count: int = 1) -> Seen:
        """What is known once so many events have come, or there is a problem; after so many seconds at most."""
        with self._news:
            self._news.wait_for(lambda: self._seen.count >= count or self._seen.problem, seconds)
        return self._seen

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self._read()
                problem = QuireError(f"{self.url}: the events broke off.")
            except QuireError as error:
                problem = error
            except (OSError, http.client.HTTPException) as error:
                problem = self._unreachable(error)
            now = self._seen
            self._tell(Seen(now.state, now.steps, problem, now.count))
            self._ends.wait(_AGAIN)

    def _read(self) -> None:
        """Read events until there are no more. Raises QuireError, OSError, HTTPException."""
        try:
            response = self._opener.open(self._request, timeout=_SILENCE)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        with response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise QuireError(f"{self.url}{PATH} answered {clean(kind)} and no events: is it quire's?")
            for name, data in events(self._parts(response)):
                if self._ends.is_set():
                    return
                if name == "error":
                    raise QuireError(f"{self.url}{PATH} ended: {_said(data) or 'the server has a fault.'}")
                if name == "state":
                    state = read_state(data)
                    before = self._seen.state
                    if before and (state.time or 0) < (before.time or 0):
                        self._steps.clear()  # another engine's: the server was started again
                    self._steps.extend(state.steps)
                    self._tell(Seen(state, tuple(self._steps), None, self._seen.count + 1))

    def _parts(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        while part := response.read1(1 << 16):
            self._heard = time.monotonic()
            yield part

    def _tell(self, seen: Seen) -> None:
        with self._news:
            self._seen = seen
            self._news.notify_all()

    def _unreachable(self, error: OSError | http.client.HTTPException) -> QuireError:
        cause = getattr(error, "reason", None) or error or type(error).__name__
        if self._seen.count:
            return QuireError(f"{self.url}: the events broke off ({cause}).")
        return QuireError(f"{self.url} cannot be reached ({cause}): does a server run there? (quire serve)")

    def _refused(self, error: urllib.error.HTTPError) -> QuireError:
        with error:
            says = _message(error)
        hint = ""
        if error.code == 401:
            hint = " (--api-key KEY, or OPENAI_API_KEY)"
        elif error.code == 404:
            hint = " (quire's servers have this route; which server is this?)"
        return QuireError(f"{self.url}{PATH} answered {error.code}: {says}{hint}")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        said = _said(error.read(_LONGEST_ERROR))
    except (OSError, http.client.HTTPException):
        said = None
    return said or clean(error.reason or "no reason", _LONGEST_MESSAGE)


def _said(body: str | bytes) -> str | None:
    """What an error's body says, in any of the ways that are usual."""
    try:
        value = json.loads(body)
        value = value.get("error", value)
        said = value if isinstance(value, str) else value.get("message") or value.get("detail")
    except (AttributeError, RecursionError, ValueError):
        return None
    return clean(said, _LONGEST_MESSAGE) if isinstance(said, str) else None


def _request(url: str, key: str | None, rate: float) -> urllib.request.Request:
    if not url.startswith(("http://", "https://")):
        raise QuireError(f"{url}: a server's address begins with http:// or https://.")
    if key and not (key.isascii() and key.isprintable()):
        raise QuireError("the key has characters that no header can have.")
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        return urllib.request.Request(f"{url}{PATH}?rate={rate:g}", headers=headers)
    except ValueError as error:
        raise QuireError(f"{url}: {error}") from None
