"""`quire chat` and `quire complete`: a server's answers on the terminal, quire's or any other of OpenAI's API."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import openai
import typer

from quire.cli.address import api_url
from quire.cli.conversation import BASE, Answer, Conversation, Dialogue, Message, report
from quire.cli.pictures import picture_part, read_image
from quire.cli.terminal import INTERRUPTED, note, write
from quire.errors import QuireError

_CONNECT = 10.0  # seconds; an answer may take as long as it takes
_LONGEST = 64 << 20  # bytes of an event, or of an answer in one piece

# What the client raises, or we do, over an answer that is none of this API's.
_NOT_THE_API = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Client(openai.DefaultHttpxClient):
    """Reads no more than `_LONGEST` bytes of what has no end: the openai package would hold any line of any length."""

    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        response = super().send(request, stream=True, **options)
        response.iter_bytes = _bounded(response.iter_bytes, by_event=stream)  # type: ignore[method-assign]
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response


def _bounded(iter_bytes: Callable[..., Iterator[bytes]], by_event: bool) -> Callable[..., Iterator[bytes]]:
    """The same, but QuireError once there is too much; by_event: counted from the last empty line on."""

    def bounded(*args: Any) -> Iterator[bytes]:
        held, tail = 0, b""
        for part in iter_bytes(*args):
            seen = tail + part  # an empty line may come in two parts
            end = max(seen.rfind(line) for line in (b"\n\n", b"\r\r", b"\r\n\r\n")) if by_event else -1
            held, tail = (len(seen) - end if end >= 0 else held + len(part)), seen[-3:]
            if held > _LONGEST:
                raise QuireError(f"the server's answer has no end: {_LONGEST} bytes of it are here.")
            yield part

    return bounded


class Server:
    """The partner in a conversation: a model of a server's. Every method raises QuireError where the server fails.

    model: its name there; None takes the first one. params: fields of the requests, besides.
    """

    def __init__(self, url: str, model: str | None, key: str | None, params: Mapping[str, Any]) -> None:
        self.url = api_url(url)
        # Without a key the client would refuse to start; a server that wants none does not look at it.
        key = key or os.environ.get("OPENAI_API_KEY") or "none"
        timeout = openai.Timeout(None, connect=_CONNECT)
        try:
            transport = _Client(timeout=timeout)
            self._client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, http_client=transport)
        except Exception as error:  # whatever its transport makes of a URL
            raise QuireError(f"{self.url}: {error}") from None
        self._params = dict(params)
        self._known = self._list(needed=model is None)
        self.base = model or self._known[0]
        self.model = self.base

    def _list(self, needed: bool) -> list[str]:
        """The models' names; servers that list none are served too, where the model is named."""
        try:
            names = [_text(one.id) for one in self._client.models.list().data]
        except openai.NotFoundError as error:
            if needed:
                raise self._error(error) from None
            return []
        except Exception as error:
            raise self._error(error) from None
        if needed and not names:
            raise QuireError(f"{self.url} lists no model: name one with --model-name.")
        return names

    def answer(self, messages: Sequence[Message]) -> Answer:
        request = self._request(messages=messages)
        return self._stream(lambda: self._client.chat.completions.create(**request), _content_of)

    def complete(self, prompt: str) -> Answer:
        """As `answer`, of a text that is continued."""
        request = self._request(prompt=prompt)
        return self._stream(lambda: self._client.completions.create(**request), lambda one: one.text)

    def _request(self, **asked: Any) -> dict[str, Any]:
        shown = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, **shown, **self._params}

    def picture(self, source: str) -> Message:
        return picture_part(source, read_image(source))

    def choose(self, name: str) -> None:
        if name != BASE and self._known and name not in self._known:
            self._known = self._list(needed=False)
            if name not in self._known:
                note(f"{self.url} does not list {name}; it may know it all the same.")
        self.model = self.base if name == BASE else name

    def names(self) -> list[str]:
        return [BASE, *self._known]

    def _stream(self, ask: Callable[[], Any], text_of: Callable[[Any], str | None]) -> Answer:
        """Show an answer as it comes. Ctrl-C hangs up, upon which the server stops too."""
        stream = _Stream(text_of)
        try:
            with ask() as events:
                stream.read(events)
        except KeyboardInterrupt:
            stream.reason = "interrupted"
        except Exception as error:
            raise self._broken(error) if stream.pieces else self._error(error) from None
        finally:
            if stream.pieces:
                write("\n")
        if stream.reason is None:
            raise QuireError(f"{self.url}: the answer broke off.")
        return stream.answer()

    def _error(self, error: Exception) -> QuireError:
        """What to raise for what the client raised, or its transport did while an answer came."""
        if isinstance(error, openai.APIConnectionError):
            cause = error.__cause__ or error
            if isinstance(cause, QuireError):
                return cause
            return QuireError(f"{self.url} cannot be reached ({cause}): does a server run there? (quire serve)")
        if isinstance(error, openai.APIStatusError):
            body = error.body if isinstance(error.body, dict) else {}
            says = body.get("message") or body.get("detail") or error.response.reason_phrase
            hint = " (--api-key KEY, or OPENAI_API_KEY)" if error.status_code == 401 else ""
            return QuireError(f"{self.url} answered {error.status_code}: {says}{hint}")
        return self._broken(error)

    def _broken(self, error: Exception) -> QuireError:
        if isinstance(error, QuireError):
            return error
        if isinstance(error, openai.OpenAIError) or type(error).__module__.startswith("http"):
            return QuireError(f"{self.url}: the answer broke off ({error or type(error).__name__}).")
        if isinstance(error, _NOT_THE_API):
            return QuireError(f"{self.url}: the answer is none of OpenAI's API ({type(error).__name__}).")
        raise error


def _text(value: Any) -> str:
    """Raises TypeError: what a server sends may be anything."""
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {type(value).__name__}")
    return value


def _content_of(choice: Any) -> Any:
    return None if choice.delta is None else choice.delta.content


class _Stream:
    """An answer while it comes."""

    def __init__(self, text_of: Callable[[Any], str | None]) -> None:
        self._text_of = text_of
        self._begin = self._first = self._last = time.perf_counter()
        self._tokens: int | None = None
        self.pieces: list[str] = []
        self.reason: str | None = None

    def read(self, events: Iterable[Any]) -> None:
        for event in events:
            tokens = getattr(getattr(event, "usage", None), "completion_tokens", None)
            self._tokens = tokens if isinstance(tokens, int) else self._tokens
            for choice in event.choices or ():
                if choice.finish_reason is not None:
                    self.reason = _text(choice.finish_reason)
                if text := _text(self._text_of(choice) or ""):
                    self._last = time.perf_counter()
                    self._first = self._first if self.pieces else self._last
                    self.pieces.append(text)
                    write(text)

    def answer(self) -> Answer:
        # Servers send a token an event, or nearly so; usage, where it comes, is exact.
        tokens = len(self.pieces) if self._tokens is None else self._tokens
        spent = self._last - self._first
        rate = (tokens - 1) / spent if tokens > 1 and spent > 0 else None
        return Answer("".join(self.pieces), tokens, self.reason or "", self._first - self._begin, rate)


class _Prompts(Dialogue):
    """A dialogue whose texts are continued, each by itself."""

    def __init__(self, server: Server, verbose: bool) -> None:
        super().__init__(server, verbose)
        self._server = server

    def say(self, text: str) -> Answer:
        answer = self._server.complete(text)
        report(answer, self.verbose)
        return answer


def chat(
    server: Server, prompt: str | None, quick: bool, system: str | None, images: Sequence[str], verbose: bool
) -> None:
    """Hold a conversation; quick: of one answer. Raises QuireError; exits with 130 when Ctrl-C ends the only answer."""
    conversation = Conversation(server, verbose, system, images)
    if not quick or prompt is None:
        conversation.hold(prompt)
    elif conversation.say(prompt).finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


def complete(server: Server, prompt: str | None, verbose: bool) -> None:
    """Continue a prompt, or prompts that are asked for. Raises as `chat`."""
    prompts = _Prompts(server, verbose)
    if prompt is None:
        prompts.hold(None)
    elif prompts.say(prompt).finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)
