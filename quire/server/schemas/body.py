"""Routes that read JSON bodies in Rust: several times as fast as Python's reader. Large ones are read by a worker.

A reader of JSON holds Python's lock until all objects are made, so that a worker alone does not keep the event loop
free: what a large body holds is counted first, piece by piece, and too much of it is refused before anything is made.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import context_of
from quire.server.responses.errors import ApiError
from quire.server.schemas.openai import passing_over_unknown

MOST_VALUES = 2_000_000  # of a body: numbers, and all others too
MOST_TEXTS = 320_000  # names among them
MOST_CONTAINERS = 100_000  # lists and objects
SMALL = 64 << 10  # bytes that are read faster than handed to a worker
_PIECE = 1 << 20  # bytes that are counted at once

_T = TypeVar("_T")

_one_at_a_time = ThreadPoolExecutor(1, "quire-json")


class _JsonRequest(Request):
    """model: what the body is checked against; failure: why it is none."""

    model: type[BaseModel] | None = None
    failure: Exception | None = None

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SMALL:
            return read_json(body)
        work = partial(copy_context().run, _read_large, body, self.model)
        try:
            return await asyncio.get_running_loop().run_in_executor(_one_at_a_time, work)
        except (ApiError, RequestValidationError) as error:
            self.failure = error  # FastAPI would not let it through
            raise


def read_json(body: bytes) -> Any:
    """Raises JSONDecodeError."""
    try:
        return from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:  # which FastAPI expects to be json's own
        raise json.JSONDecodeError(str(error), "", 0) from None


def _read_large(body: bytes, model: type[BaseModel] | None) -> Any:
    """The body, checked: FastAPI takes the model as it is. Raises JSONDecodeError, ApiError, RequestValidationError."""
    _check_count(body)
    with _no_collection():
        given = read_json(body)
        return given if model is None else validated(given, model)


def validated(given: Any, model: type[BaseModel]) -> BaseModel:
    """A body as its model. Raises RequestValidationError."""
    try:
        return model.model_validate(given, from_attributes=True)
    except ValidationError as error:
        told = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(told) from None


async def checked(given: Any, model: type[BaseModel]) -> BaseModel:
    """A body that was read without a model, checked by the worker of large ones. Raises RequestValidationError."""
    return await on_worker(validated, given, model)


async def on_worker(function: Callable[..., _T], *args: Any) -> _T:
    """Something about a body that may take time, done by the worker of large ones."""

    def work() -> _T:
        with _no_collection():
            return function(*args)

    return await asyncio.get_running_loop().run_in_executor(_one_at_a_time, copy_context().run, work)


@dataclass
class _Count:
    """What is in a body: signs outside of texts, or at least not fewer of them. values: commas."""

    values: int = 0
    containers: int = 0
    quotes: int = 0

    def add(self, text: bytes) -> None:
        self.values += text.count(b",")
        self.containers += text.count(b"[") + text.count(b"{")

    @property
    def fits(self) -> bool:
        return self.values < MOST_VALUES and self.containers <= MOST_CONTAINERS and self.quotes // 2 <= MOST_TEXTS


def _check_count(body: bytes) -> None:
    """Raises ApiError for a body that would make too many Python objects."""
    if count_at_most(body).fits or count(body).fits:
        return
    raise ApiError(
        400,
        f"the body holds too much: {MOST_VALUES} values are the most, {MOST_TEXTS} texts, and {MOST_CONTAINERS} lists "
        "and objects.",
    )


def count_at_most(body: bytes) -> _Count:
    """As if no text held any of JSON's signs."""
    found = _Count()
    for start in range(0, len(body), _PIECE):
        piece = body[start : start + _PIECE]
        found.add(piece)
        found.quotes += piece.count(b'"')
    return found


def count(body: bytes) -> _Count:
    """What is outside of texts; no further than it fits."""
    found, held = _Count(), b""
    for start in range(0, len(body), _PIECE):
        piece = held + body[start : start + _PIECE]
        held = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)  # belongs to the next sign
        piece = piece[: len(piece) - len(held)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        found.add(b"".join(parts[found.quotes % 2 :: 2]))
        found.quotes += len(parts) - 1
        if not found.fits:
            break
    return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the collector of cycles: JSON has none, and looking for them after every few lists takes far longer."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def model_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """What an endpoint's only body is, where it has one."""
    hints = get_type_hints(endpoint)
    found = [hints.get(name) for name in inspect.signature(endpoint).parameters]
    models = [hint for hint in found if isinstance(hint, type) and issubclass(hint, BaseModel)]
    return models[0] if len(models) == 1 else None


class JsonRoute(APIRoute):
    """A route whose requests are read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model = model_of(self.endpoint)

        async def handle(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            read.model = model
            try:
                if context_of(request).config.unknown_fields != "warn":
                    return await handler(read)
                with passing_over_unknown() as unknown:
                    request.scope.setdefault("state", {})["unknown"] = unknown
                    return await handler(read)
            except Exception:
                if read.failure is not None:
                    raise read.failure from None
                raise

        return handle
