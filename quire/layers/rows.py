"""Whose rows a layer sees, where they are not the step's tokens one by one.

A layer finds the adapter of a row by the row's number. A model that calls layers on other rows says which they are:

    with repeated(num_heads):             # [T * H, D]: a token's H heads, one behind the other
        q = self.q_proj(x.view(-1, D))
    with gathered(rows):                  # row i is token rows[i]'s
        out[rows] += expert(x[rows])

Nothing is computed unless a step has adapters. The two may stand in one another: the inner one's rows are the outer's.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments


class _Innermost(threading.local):
    """The innermost one that this thread is in."""

    rows: _Rows | None = None


_innermost = _Innermost()


class _Rows(ABC):
    """A context within which layers see other rows."""

    def __enter__(self) -> None:
        self._outer = _innermost.rows
        _innermost.rows = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _innermost.rows = self._outer

    def of(self, segments: LoraSegments) -> LoraSegments:
        """The step's segments, as layers see them here."""
        return self._mapped(segments if self._outer is None else self._outer.of(segments))

    @abstractmethod
    def _mapped(self, segments: LoraSegments) -> LoraSegments:
        """The segments of the rows that are outside of this one, as layers see them in it."""


class repeated(_Rows):
    """Layers see each row `times` times, one after the other."""

    def __init__(self, times: int) -> None:
        self._times = times

    def _mapped(self, segments: LoraSegments) -> LoraSegments:
        return segments.repeated(self._times)


class gathered(_Rows):
    """Layers see some of the rows, in any order and any number of times.

    rows: their numbers, [R] int64 or a list. Of a tensor the numbers are read, if there are adapters in the step: such
    a step is not recorded.
    """

    def __init__(self, rows: torch.Tensor | Sequence[int]) -> None:
        self._given = rows
        self._places: tuple[int, ...] | None = None

    def _mapped(self, segments: LoraSegments) -> LoraSegments:
        if self._places is None:
            given = self._given
            self._places = tuple(given.tolist() if isinstance(given, torch.Tensor) else given)
        return segments.gathered(self._places)


def take(rows: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows [R] int64 of tensors [T, C], each by itself: [R, C] each. What goes on with them is `gathered`."""
    return tuple(kernels.embedding(rows, one) for one in tensors)


def current_segments(segments: LoraSegments) -> LoraSegments:
    """The step's segments, as the layer that is called now sees them."""
    return segments if _innermost.rows is None else _innermost.rows.of(segments)
