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
from quire.kernels.table import TABLE

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
    query: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    window: int,
    slopes: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    head_scales: torch.Tensor | None,
    visible_end: torch.Tensor | None,
    chunk: int,
    biases: torch.Tensor | None,
    DV: int,
    values_stride: int,
) -> None:
    own = tuple(None if one is None else one.shape for one in (slopes, sinks, head_scales, biases))
    sizes = query.shape[1:], keys.shape[1:3], (DV, values_stride)
    options = (*sizes, query.dtype, window, softcap, own, visible_end is not None, chunk)
    target = _target.get()
    if options not in target.seen:
        _attend_once(target, *options, scale)
        target.seen.add(options)


def _attend_once(
    target: _Target,
    heads: torch.Size,
    block: torch.Size,
    value: tuple[int, int],
    dtype: torch.dtype,
    window: int,
    softcap: float,
    own: tuple[torch.Size | None, ...],
    with_ends: bool,
    chunk: int,
    scale: float,
) -> None:
    """One token, alone in its block of keys and values.

    heads: [H, D]; block: [key heads, block size]; value: its size, and the distance of rows; own: the shapes of slopes,
    sinks, scales of heads and biases.
    """
    device = target.device
    make = partial(torch.zeros, dtype=dtype, device=device)
    numbers = partial(torch.tensor, dtype=torch.int32, device=device)
    slopes, sinks, scales, biases = (None if shape is None else torch.zeros(shape, device=device) for shape in own)
    target.attention(
        make((1, *heads)), make((1, *block, heads[1])), make((1, *block, value[1]))[..., : value[0]], numbers([[0]]),
        numbers([0, 1]), numbers([1]), scale, window, slopes, softcap, sinks, scales,
        numbers([1]) if with_ends else None, chunk, biases=biases,
    )  # fmt: skip


def _refusal(what: str) -> Callable[[], None]:
    def refuse_gpu() -> None:
        if _target.get().device.type not in ("cpu", "meta"):
            raise RuntimeError(f"{what} have kernels for the CPU alone")

    return refuse_gpu


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise RefusedError(str(error)) from error

    return called


_done_by: dict[str, Callable[..., None]] = {name: _refusal(op.cpu_only) for name, op in TABLE.items() if op.cpu_only}
_done_by["paged_attention"] = _paged_attention
# What heads have of their own is looked at where it is used, on the device.
_unchecked = frozenset({"slopes", "sinks", "head_scales", "biases"})
_functions = column("meta", done_by=_done_by, unchecked=_unchecked)
globals().update({name: _refusing(function) for name, function in _functions.items()})
