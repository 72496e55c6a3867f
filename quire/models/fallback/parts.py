"""quire's layers in the places of transformers', for rows in any number of dimensions, under the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.layers import Embedding, LayerNorm, Linear, RMSNorm


class FlatLinear(Linear):
    """`Linear` for any number of leading dimensions."""

    packs = False  # transformers' code has it, and may look at its weight

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        flat = x.reshape(-1, self.in_features).contiguous()
        return super().forward(flat, out_dtype).view(*x.shape[:-1], self.out_features)


class Head(FlatLinear):
    """The projection to the vocabulary: scores are float32."""

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().forward(x, out_dtype or torch.float32)


class FlatEmbedding(Embedding):
    """`Embedding` for ids in any number of dimensions, times a number of the module's."""

    def __init__(self, num_embeddings: int, size: int, factor: torch.Tensor | None = None) -> None:
        super().__init__(num_embeddings, size)
        self.num_embeddings, self.embedding_dim = num_embeddings, size
        self.factor = None if factor is None else float(factor)

    def forward(self, ids: torch.Tensor, added: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """ids: [...] int64 -> [..., size]."""
        y = super().forward(ids.reshape(-1), added, first).view(*ids.shape, -1)
        if self.factor is None:
            return y
        return y * torch.tensor(self.factor, dtype=y.dtype, device=y.device)


class FlatRMSNorm(RMSNorm):
    """`RMSNorm` of rows in any number of dimensions."""

    heads_first = False

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        return _of_rows(self, super().forward, residual)


class FlatLayerNorm(LayerNorm):
    """`LayerNorm` of rows in any number of dimensions."""

    heads_first = False

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        return _of_rows(self, super().forward, residual)


def _of_rows(norm: FlatRMSNorm | FlatLayerNorm, forward: Any, x: torch.Tensor) -> torch.Tensor:
    """x: [1, T, C], or of heads [1, T, H, D] or [1, H, T, D]."""
    if norm.adapters is None or x.dim() < 4:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return forward(flat).view(x.shape)
    heads = x[0].transpose(0, 1) if norm.heads_first else x[0]
    y = forward(heads)
    return (y.transpose(0, 1) if norm.heads_first else y).unsqueeze(0)


class Activation(nn.Module):
    """One of the kernels' activations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return kernels.activation(flat, self.kind).view(x.shape)
