"""The kernels for tensors without numbers (torch's meta device): arguments are checked, and results have shapes alone.

A model's forward pass is gone through with these when it is loaded, so that what a kernel does not take is found then
and not by the first request. Attention has options that a device may not have: it is called once for each set of them,
on the device and for one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.operands import Operands

_operands = Operands("meta")
_target: ContextVar[_Target] = ContextVar("target")


class RefusedError(Exception):
    """A kernel does not take what it was given; the message says what."""


class _Target:
    """The device that a rehearsal is for, and the sets of options that its attention was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: set[tuple[Any, ...]] = set()


@contextmanager
def rehearsing(device: torch.device) -> Iterator[None]:
    """Let this thread's calls, on meta tensors, stand for calls on `device`. They raise RefusedError."""
    token = _target.set(_Target(device))
    try:
        yield
    finally:
        _target.reset(token)


def is_on() -> bool:
    """Whether this thread rehearses."""
    return _target.get(None) is not None


def _checked(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise RefusedError(str(error)) from error


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    return _checked(_operands.linear, x, weights, biases, out_dtype)[1]


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    _, out = _checked(_operands.paged_attention, query, keys, values, block_table, query_start, context_len, scale)
    options = (query.shape[1], tuple(keys.shape[1:]), query.dtype, window, None if slopes is None else slopes.shape)
    target = _target.get()
    if options not in target.seen:
        _checked(partial(_attend_once, target.device), *options, scale)
        target.seen.add(options)
    return out


def _attend_once(
    device: torch.device,
    heads: int,
    block: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    slopes: torch.Size | None,
    scale: float,
) -> None:
    """One token, alone in its block of keys and values, [key heads, block size, head size]."""
    cache = torch.zeros((1, *block), dtype=dtype, device=device)
    numbers = partial(torch.tensor, dtype=torch.int32, device=device)
    kernels.paged_attention(
        torch.zeros((1, heads, block[2]), dtype=dtype, device=device), cache, cache, numbers([[0]]), numbers([0, 1]),
        numbers([1]), scale, window, None if slopes is None else torch.zeros(slopes, device=device),
    )  # fmt: skip


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    _checked(_operands.write_kv, key, value, keys, values, slot_mapping)


def embedding(ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    return _checked(_operands.embedding, ids, table, added)[1]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    return _checked(_operands.norm, x, weight, None, eps, residual)[1]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    return _checked(_operands.norm, x, weight, bias, eps, residual)[1]


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _checked(_operands.rotary, query, key, positions, cos_sin)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _checked(_operands.activation, x, kind, False)[1]


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _checked(_operands.activation, x, kind, True)[1]
