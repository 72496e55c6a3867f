"""Tables that are looked up by token id or by position."""

from __future__ import annotations

import torch
from torch import nn

from quire import kernels
from quire.kernels import packed
from quire.kernels.quantized import QuantizedWeight, RowLayout
from quire.layers.adapters import EmbeddingAdapters, adapt_embedding


class Embedding(nn.Module):
    """Rows of weight [num_embeddings, size], times `scale`.

    layout: of quantized rows, whose weight is [num_embeddings, row_bytes] uint8; None: they are floats, which a
    projection that shares them may have packed (`kernels/packed.py`).
    adapters: what LoRA adapters change here; None while none does. unadapted: why none can, where none can.
    """

    adapters: EmbeddingAdapters | None = None
    unadapted: str = ""

    def __init__(self, num_embeddings: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.num_embeddings, self.size = num_embeddings, size
        self.layout: RowLayout | None = None
        self._dtype: torch.dtype | None = None
        self.weight = nn.Parameter(torch.empty(num_embeddings, size), requires_grad=False)

    def set_layout(self, layout: RowLayout, dtype: torch.dtype) -> None:
        """Take rows of bytes in the place of floats, before any are loaded. dtype: of what they give."""
        rows = torch.empty((self.num_embeddings, layout.row_bytes), dtype=torch.uint8, device="meta")
        self.layout, self._dtype = layout, dtype
        self.weight = nn.Parameter(rows, requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of what `forward` returns."""
        return self._dtype or self.weight.dtype

    def forward(self, ids: torch.Tensor, added: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """Return the rows `first + ids` times `scale`, plus `added` [T, size] where it is given.

        ids: [T] int64 -> [T, size].
        """
        assert not (first and packed.is_packed(self.weight)), "a table of positions is no projection's"
        rows = self.weight[first:] if first else self.weight
        if self.layout is None:
            y = kernels.embedding(ids, rows, added, self.scale)
        else:
            y = kernels.quantized_embedding(ids, QuantizedWeight(rows.data, self.layout), self.dtype, added, self.scale)
        if self.adapters is not None and self.adapters.context.segments is not None:
            adapt_embedding(self.adapters, self.look_up, ids + first if first else ids, added, y, self.scale)
        return y

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids` [T] int64 alone -> [T, size]."""
        if self.layout is None:
            return kernels.embedding(ids, self.weight)
        return kernels.quantized_embedding(ids, QuantizedWeight(self.weight.data, self.layout), self.dtype)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """The rows `first` .. `end` as float32, [end - first, size]."""
        if self.layout is None:
            return packed.unpack(self.weight, first, end).float()
        return QuantizedWeight(self.weight.data, self.layout).dequantize(first, end)

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """`scale` times rows [T, size] that come from elsewhere: looked up in themselves, for the same bits."""
        return kernels.embedding(torch.arange(len(rows), device=rows.device), rows, None, self.scale)
