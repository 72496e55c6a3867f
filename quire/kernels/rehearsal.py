"""The column of tensors without numbers (torch's meta device): arguments are checked, and results have shapes alone.

A model's forward pass is gone through with these when it is loaded, so that what a kernel does not take is found then
and not by the first request. Attention has options that a device may not have: it is called once for each set of them,
on the device and for one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch

from quire.kernels.binding import column

_target: ContextVar[_Target] = ContextVar("target")


class RefusedError(Exception):
    """A kernel does not take what it was given; the message says what."""


class _Target:
    """The device that a rehearsal is for, its attention, and the sets of options that this was asked for."""

    def __init__(self, device: torch.device, attention: Callable[..., torch.Tensor]) -> None:
        self.device = device
        self.attention = attention
        self.seen: set[tuple[Any, ...]] = set()


@contextmanager
def rehearsing(device: torch.device, attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let this thread's calls, on meta tensors, stand for calls on `device`. They raise RefusedError.

    attention: `kernels.paged_attention`, which is called there.
    """
    token = _target.set(_Target(device, attention))
    try:
        yield
    finally:
        _target.reset(token)


def is_on() -> bool:
    """Whether this thread rehearses."""
    return _target.get(None) is not None


def _paged_attention(
    query: torch.Tensor, keys: torch.Tensor, scale: float, window: int, slopes: torch.Tensor | None
) -> None:
    block = keys.shape[1], keys.shape[2], keys.shape[3]
    options = (query.shape[1], block, query.dtype, window, None if slopes is None else slopes.shape)
    target = _target.get()
    if options not in target.seen:
        _attend_once(target, *options, scale)
        target.seen.add(options)


def _attend_once(
    target: _Target,
    heads: int,
    block: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    slopes: torch.Size | None,
    scale: float,
) -> None:
    """One token, alone in its block of keys and values, [key heads, block size, head size]."""
    device = target.device
    cache = torch.zeros((1, *block), dtype=dtype, device=device)
    numbers = partial(torch.tensor, dtype=torch.int32, device=device)
    target.attention(
        torch.zeros((1, heads, block[2]), dtype=dtype, device=device), cache, cache, numbers([[0]]), numbers([0, 1]),
        numbers([1]), scale, window, None if slopes is None else torch.zeros(slopes, device=device),
    )  # fmt: skip


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise RefusedError(str(error)) from error

    return called


# Slopes are looked at where they are used, on the device.
_functions = column("meta", done_by={"paged_attention": _paged_attention}, unchecked=frozenset({"slopes"}))
globals().update({name: _refusing(function) for name, function in _functions.items()})
