"""Transformers' rotary embeddings as tables: what belongs to a position is computed once, in pages of one size, so that
it does not depend on what else is asked for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.models.fallback.attention import position_limit

_PAGE = 1024  # positions
_LENGTHS = ("dynamic", "longrope")


def is_rotary(module: nn.Module) -> bool:
    """Whether it makes rotations of (anything, position_ids), and of nothing else but the type of a layer."""
    if "Rotary" not in type(module).__name__ or any(True for _ in module.parameters()):
        return False
    names = list(inspect.signature(module.forward).parameters)
    return names[:2] == ["x", "position_ids"] and set(names[2:]) <= {"layer_type"}


def check_lengths(module: nn.Module) -> None:
    """Raise UnsupportedModelError for rotations that depend on how long a sequence is."""
    kinds = getattr(module, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if kind in _LENGTHS:
            raise UnsupportedModelError(
                f"{type(module).__name__}: rope_type {kind!r} turns a token by how long its sequence is, and this way "
                "cannot tell sequences of a step apart."
            )


class RotaryTables(nn.Module):
    """Calls as the original takes them, answered from tables."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self._pages: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}
        self._alone: dict[tuple[Any, ...], bool] = {}
        self._outgrown: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        """Transformers' code also reads what the original has of its own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """position_ids: [1, T]. Returns what the original does: a tensor, or a tuple, of [1, T, ...] each."""
        key = layer_type, x.dtype, x.device
        tables = self._pages.get(key, ())
        limit = position_limit()
        last = int(position_ids.max()) if limit is None else limit - 1
        if not tables or last >= len(tables[0]):
            self._outgrown += tables  # which recorded steps read
            tables = self._pages[key] = self._grown(x, tables, last, layer_type)
        rows = tuple(table[position_ids[0]].unsqueeze(0) for table in tables)
        return rows[0] if self._alone[key] else rows

    def _grown(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, ...], last: int, layer_type: str | None
    ) -> tuple[torch.Tensor, ...]:
        known = len(tables[0]) if tables else 0
        pages = [tables] if tables else []
        options = {} if layer_type is None else {"layer_type": layer_type}
        for start in range(known, last + 1, _PAGE):
            positions = torch.arange(start, start + _PAGE, device=x.device).unsqueeze(0)
            made = self.original(x[:, :1], positions, **options)
            self._alone[(layer_type, x.dtype, x.device)] = isinstance(made, torch.Tensor)
            made = (made,) if isinstance(made, torch.Tensor) else tuple(made)
            if any(one.shape[:2] != (1, _PAGE) for one in made):
                raise UnsupportedModelError(f"{type(self.original).__name__}: its rotations are not one a position.")
            pages.append(tuple(one[0] for one in made))
        return tuple(torch.cat(parts) for parts in zip(*pages, strict=True))
