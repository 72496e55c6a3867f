"""Tables that are looked up by token id or by position."""

from __future__ import annotations

import torch
from torch import nn

from quire import kernels
from quire.layers.adapters import EmbeddingAdapters, adapt_embedding


class Embedding(nn.Module):
    """Rows of weight [num_embeddings, size], times `scale`.

    adapters: what LoRA adapters change here; None while none does. unadapted: why none can, where none can.
    """

    adapters: EmbeddingAdapters | None = None
    unadapted: str = ""

    def __init__(self, num_embeddings: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_embeddings, size), requires_grad=False)

    def forward(self, ids: torch.Tensor, added: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """Return the rows `first + ids` times `scale`, plus `added` [T, size] where it is given.

        ids: [T] int64 -> [T, size].
        """
        y = kernels.embedding(ids, self.weight[first:] if first else self.weight, added, self.scale)
        if self.adapters is not None and self.adapters.context.segments is not None:
            adapt_embedding(self.adapters, self.weight, ids + first if first else ids, added, y, self.scale)
        return y

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """`scale` times rows [T, size] that come from elsewhere: looked up in themselves, for the same bits."""
        return kernels.embedding(torch.arange(len(rows), device=rows.device), rows, None, self.scale)
