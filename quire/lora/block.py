"""An adapter's tensors in one block of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from quire import huge_pages
from quire.errors import AdapterError

_ALIGNMENT = 64  # bytes
_T = TypeVar("_T")


def in_one_block(
    changes: Mapping[str, _T], parameters: Mapping[str, torch.Tensor], most: int, where: str
) -> tuple[dict[str, _T], dict[str, torch.Tensor], int]:
    """All tensors moved into one block of memory, which the system gets back as one; and its bytes.

    changes: dataclasses of tensors, of any dtype. most: bytes that it may have. where: the adapter, for messages.
    Raises AdapterError for a larger one, and for numbers that are not finite.
    """
    places: list[tuple[torch.Tensor, int]] = []
    size = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal size
        places.append((tensor, size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return tensor

    for value in (*changes.values(), *parameters.values()):
        _each_tensor(value, count)
    if size > most:
        raise AdapterError(f"{where}: takes {size:,} bytes, and at most {most:,} are given to adapters at once.")
    memory = huge_pages.allocate(size)
    pending = iter(places)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        _, start = next(pending)
        target = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if not bool(tensor.isfinite().all()):
            raise AdapterError(f"{where}: has weights that are infinite or no numbers (as {tensor.dtype}).")
        return target.copy_(tensor)

    moved = {name: _each_tensor(change, move) for name, change in changes.items()}
    return moved, {name: _each_tensor(tensor, move) for name, tensor in parameters.items()}, size


def _each_tensor(value: _T, use: Callable[[torch.Tensor], torch.Tensor]) -> _T:
    """A copy with every tensor replaced by what `use` makes of it; the model's own parameters stay."""
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = value if isinstance(value, nn.Parameter) or value.dtype is torch.int64 else use(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        result = dataclasses.replace(value, **{name: _each_tensor(getattr(value, name), use) for name in names})
    return cast(_T, result)
