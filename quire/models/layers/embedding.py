"""Tables that are looked up by token id or by position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """Rows of weight [num_embeddings, size]."""

    def __init__(self, num_embeddings: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [T] int64 -> [T, size]."""
        return F.embedding(ids, self.weight)
