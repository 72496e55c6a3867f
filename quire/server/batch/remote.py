"""A batch through a server that runs, or the door of replicas: each request as any client sends it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import openai
from pydantic_core import from_json

from quire.errors import QuireError
from quire.server.batch.answers import Answer, AnswerFile
from quire.server.batch.command import Outcome, answer_all
from quire.server.batch.plan import Plan
from quire.server.batch.requests import BatchRequest
from quire.server.batch.run import BatchEndedError, BatchRun, Later, Tally
from quire.server.http.descriptors import room_for

# The HTTP library of this version of the package.
_CLIENT = next(one for one in openai.DefaultAsyncHttpxClient.__mro__ if one.__name__ == "AsyncClient")
_http: Any = sys.modules[_CLIENT.__module__.partition(".")[0]]

_CONNECT = 10.0  # seconds; an answer may take as long as it takes
_AWAY = frozenset({502, 503, 504, 529})  # that may be otherwise when it is asked again
_LARGEST = 512 << 20  # bytes of an answer
_LARGEST_LIST = 16 << 20  # bytes of the list of models
# A machine that is gone closes no connection: after 30 s without a word the system asks, and after 60 s it is closed.
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), seconds)
        for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
)


def run_batch(
    url: str, key: str | None, concurrency: int, plan: Plan, file: AnswerFile, on_answer: Callable[[Tally], object]
) -> Outcome:
    """Answer the requests that have no answer. url: of the server, with or without /v1. concurrency: requests in
    flight. Raises QuireError for a server that is not there, or does not know the key.
    """
    return asyncio.run(_run(url, key, room_for(concurrency), plan, file, on_answer))


async def _run(
    url: str, key: str | None, most: int, plan: Plan, file: AnswerFile, on_answer: Callable[[Tally], object]
) -> Outcome:
    async with Remote(url, key) as remote:
        await remote.check()
        return await answer_all(BatchRun(remote.ask, file, most, plan.most, on_answer), plan)


class Remote:
    """A server. Use as a context manager, around its connections."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises QuireError for what is no URL, or no key."""
        self._url = url.removesuffix("/v1")
        key = key.strip() if key else None  # h11 would tell a key with blanks in its error
        if key and not (key.isascii() and key.isprintable()):
            raise QuireError("the key has characters that no header can have (--api-key, or QUIRE_API_KEY).")
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        try:
            self._client = _http.AsyncClient(
                base_url=self._url,
                headers=headers,
                timeout=openai.Timeout(None, connect=_CONNECT),
                transport=_http.AsyncHTTPTransport(
                    limits=_http.Limits(max_connections=None, max_keepalive_connections=None), socket_options=_ALIVE
                ),
            )
        except Exception as error:  # whatever the transport makes of a URL or a key
            raise QuireError(f"{url}: {error}") from None
        self._suspect = False  # a connection ended before its answer, and nothing has been heard since

    async def __aenter__(self) -> Remote:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._client.__aexit__(*raised)

    async def check(self) -> None:
        """Before anything is asked. Raises QuireError for a server that is not there, or does not know the key."""
        try:
            async with self._client.stream("GET", "/v1/models") as answer:
                body = await _read(answer, _LARGEST_LIST)
        except (_http.RequestError, _http.InvalidURL, ValueError) as error:
            raise QuireError(
                f"{self._url} cannot be reached ({_said(error)}): does a server run there? (quire serve, quire deploy)"
            ) from None
        if answer.status_code in (401, 403):
            raise QuireError(self._no_key(answer.status_code))
        if answer.is_redirect:
            raise QuireError(self._elsewhere(answer.status_code, answer.headers))
        if answer.status_code < 500 and answer.status_code != 429 and (body is None or _object(body) is None):
            raise QuireError(
                f"{self._url}/v1/models answered {answer.status_code}, and no JSON object: is it OpenAI's API?"
            )

    def _no_key(self, status: int) -> str:
        return f"{self._url} answered {status}: it wants another key (--api-key KEY, or QUIRE_API_KEY)"

    def _elsewhere(self, status: int, headers: Any) -> str:
        place = headers.get("location", "its address")
        return f"{self._url} answered {status}, which says that it is elsewhere: --url {place}, perhaps."

    async def ask(self, request: BatchRequest) -> Answer | Later:
        """One request's answer. Raises BatchEndedError if the key is not taken any more, or the server is elsewhere."""
        if self._suspect and (away := await self._still_away(request)):
            return away
        headers = {"x-request-id": request.id}
        try:
            async with self._client.stream("POST", request.url, content=request.body, headers=headers) as response:
                body = await _read(response)
        except (_http.ConnectError, _http.ConnectTimeout) as error:
            why = f"{self._url} cannot be reached ({_said(error)})"
            return Later(why, seconds=0.0, answer=_none(request, 503, why))
        except _http.RequestError as error:
            self._suspect = True
            why = f"the connection ended before the answer did ({_said(error)})"
            return Later(why, broken=True, seconds=0.0, answer=_none(request, 502, why))
        return self._read(request, response.status_code, response.headers, body)

    async def _still_away(self, request: BatchRequest) -> Later | None:
        """What forwards to a server that is not there takes connections, and ends them: no request is to blame."""
        try:
            async with self._client.stream("GET", "/v1/models"):
                pass
        except _http.RequestError as error:
            why = f"{self._url} cannot be reached ({_said(error)})"
            return Later(why, seconds=0.0, answer=_none(request, 503, why))
        self._suspect = False
        return None

    def _read(self, request: BatchRequest, status: int, headers: Any, body: bytes | None) -> Answer | Later:
        if status == 401:
            raise BatchEndedError(self._no_key(status))
        if 300 <= status < 400:
            raise BatchEndedError(self._elsewhere(status, headers))
        if body is None:
            return _none(request, 502, f"the answer (status {status}) has more than {_LARGEST} bytes.")
        given = _object(body)
        if given is None:
            said = body[:200].decode(errors="replace")
            answer = _none(request, status if status >= 400 else 502, f"the answer is no JSON object: {said!r}")
        else:
            line = json.dumps(given, separators=(",", ":")).encode() if b"\n" in body or b"\r" in body else body
            answer = Answer(status, headers.get("x-request-id") or request.id, line)
        if status != 429 and status not in _AWAY:
            return answer
        why = f"{self._url} answered {status}: {_message(given)}"
        return Later(why, status == 429, _is_broken(given), _retry_after(headers), answer)


async def _read(response: Any, most: int = _LARGEST) -> bytes | None:
    """The whole body; None: it is too large."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        given = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def _error(given: dict[str, Any] | None) -> dict[str, Any]:
    error = (given or {}).get("error")
    return error if isinstance(error, dict) else {}


def _message(given: dict[str, Any] | None) -> str:
    return str(_error(given).get("message") or "it does not say why")[:200]


def _is_broken(given: dict[str, Any] | None) -> bool:
    """A door says so of the replica that it had asked."""
    return _error(given).get("code") == "replica_ended"


def _retry_after(headers: Any) -> float:
    """Seconds."""
    given = str(headers.get("retry-after", ""))
    try:
        return max(0.0, float(given) if given.strip().isdigit() else parsedate_to_datetime(given).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _none(request: BatchRequest, status: int, why: str) -> Answer:
    """What a request has in place of an answer."""
    error = {"message": why, "type": "server_error", "param": None, "code": "no_answer"}
    return Answer(status, request.id, json.dumps({"error": error}, separators=(",", ":")).encode())


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
