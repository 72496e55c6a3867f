"""The heads of a fused projection in the order that attention takes, by a kernel: torch's copies are not recorded."""

from __future__ import annotations

from functools import cache

import torch

from quire import kernels
from quire.types import MOST_RECORDED


class HeadOrder:
    """Puts the heads of a fused projection into the order that attention takes: queries, then keys, then values.

    A copy, and no arithmetic. `head_order` and `grouped_heads` make one, the same for all layers of a model.
    """

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []  # recorded steps know a table by its address
        with torch.device("cpu"):  # models are built on the meta device
            self._table(MOST_RECORDED, torch.device("cpu"))

    def __call__(self, fused: torch.Tensor) -> torch.Tensor:
        """fused: [T, heads * head_dim], contiguous; of the result, head i is the projection's head `order[i]`."""
        tokens, heads = fused.shape[0], len(self.order)
        ids = self._table(tokens, fused.device)[: tokens * heads]
        return kernels.embedding(ids, fused.view(tokens * heads, -1)).view(fused.shape)

    def _table(self, tokens: int, device: torch.device) -> torch.Tensor:
        """[at least tokens * heads] int64: where each head of each token lies."""
        table, heads = self._tables.get(device), len(self.order)
        if table is None or len(table) < tokens * heads:
            if device.type == "meta":  # a rehearsal's: nothing of it is kept
                return torch.empty(tokens * heads, dtype=torch.int64, device=device)
            if table is not None:
                self._outgrown.append(table)
                tokens = max(tokens, 2 * len(table) // heads)
            starts = torch.arange(max(tokens, MOST_RECORDED), device=device).unsqueeze(1) * heads
            table = self._tables[device] = (starts + torch.tensor(self.order, device=device)).view(-1)
        return table


@cache
def head_order(order: tuple[int, ...]) -> HeadOrder:
    """order: for each head of the result, its place in the projection."""
    return HeadOrder(order)


def grouped_heads(groups: int, queries: int) -> HeadOrder:
    """The order of a projection that has, for each of `groups` key heads, its queries, then its key, then its value."""
    size = queries + 2
    starts = [group * size for group in range(groups)]
    return head_order(
        (
            *(start + query for start in starts for query in range(queries)),
            *(start + queries for start in starts),
            *(start + queries + 1 for start in starts),
        )
    )
