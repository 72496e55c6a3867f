"""A number for each position, by which queries are multiplied: scores of far tokens, sharpened (arXiv:2501.19399)."""

from __future__ import annotations

import torch

from quire import kernels
from quire.types import ForwardContext

# The table is made by so many rows at a time, when a position first needs them, as those of rotations are.
_PAGE = 2048


class PositionFactors:
    """1 + strength * log(1 + floor((position + first) / length)): 1 for the first `length` positions, then more.

    No module: it has no parameters. One serves all layers of a model.
    """

    def __init__(self, length: float, strength: float, first: int, max_positions: int) -> None:
        self._length, self._strength, self._first = length, strength, first
        self._most = max_positions
        with torch.device("cpu"):  # models are built on the meta device
            self._table = torch.empty(0, 1)
        self._outgrown: list[torch.Tensor] = []  # recorded steps know a table by its address

    def __call__(self, ctx: ForwardContext) -> torch.Tensor:
        """[T] float32: those of the step's tokens."""
        table = self._rows(min(ctx.position_limit, self._most), ctx.positions.device)
        return kernels.embedding(ctx.positions, table).view(-1)

    def _rows(self, count: int, device: torch.device) -> torch.Tensor:
        """[at least `count`, 1] float32"""
        table = self._table
        if count > len(table) or table.device != device:
            if device.type == "meta":  # a rehearsal's: nothing of it is kept
                return torch.empty(count, 1, device=device)
            pages = [self._page(start) for start in range(len(table), count, _PAGE)]
            self._outgrown.append(table)
            self._table = table = torch.cat([part.to(device) for part in (table, *pages)])
        return table

    def _page(self, start: int) -> torch.Tensor:
        """The quotients are float32 ones, as transformers has them; the rest is rounded once."""
        positions = torch.arange(start, start + _PAGE).float()
        steps = torch.floor((positions + self._first) / self._length)
        return (1 + self._strength * torch.log1p(steps.double())).float().unsqueeze(1)
