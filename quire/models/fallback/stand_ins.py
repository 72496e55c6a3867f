"""What stands for layers while a step is gone through without weights: cheap, and each token by itself."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Marks(Protocol):
    """Remembers which tensors are about tokens."""

    def aside(self) -> Any: ...

    def mark(self, x: torch.Tensor) -> torch.Tensor: ...

    def called(self, module: nn.Module, x: torch.Tensor) -> None: ...


def mixed(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., K] -> [..., size]: of every row something that depends on all of it."""
    x = x.detach().float()
    turned = x.roll(1, -1) + x.mean(-1, keepdim=True)
    wide = turned.repeat(*[1] * (x.dim() - 1), -(-size // x.shape[-1]))[..., :size]
    steps = torch.arange(size, device="cpu").remainder(7).float() * 0.25 - 0.75
    return (wide * steps).tanh() + 0.1 * steps


class StandInLinear(nn.Module):
    path: str

    def __init__(self, marks: Marks, in_features: int, out_features: int) -> None:
        super().__init__()
        self.marks, self.in_features, self.out_features = marks, in_features, out_features
        self.weight = nn.Parameter(torch.zeros(()).expand(out_features, in_features), requires_grad=False)
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.marks.called(self, x)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"a row of {self.in_features} is expected, got {list(x.shape)}")
        with self.marks.aside():
            y = mixed(x, self.out_features).to(x.dtype)
        return self.marks.mark(y)


class StandInTable(nn.Module):
    """In the place of an embedding."""

    path: str

    def __init__(self, marks: Marks, table: nn.Embedding) -> None:
        super().__init__()
        self.marks, self.num_embeddings, self.embedding_dim = marks, table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx
        self.weight = nn.Parameter(torch.zeros(()).expand(*table.weight.shape), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with self.marks.aside():
            y = mixed((ids.unsqueeze(-1) + torch.arange(3)).float().sin(), self.embedding_dim)
        return self.marks.mark(y)


class StandInRows(nn.Module):
    """In the place of a norm or an activation that a kernel computes."""

    path: str

    def __init__(self, marks: Marks, original: nn.Module) -> None:
        super().__init__()
        self.marks = marks
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.marks.called(self, x)
        with self.marks.aside():
            y = mixed(x, x.shape[-1]).to(x.dtype)
        return self.marks.mark(y)


class StandInExperts(nn.Module):
    path: str

    def __init__(self, marks: Marks, original: Any) -> None:
        super().__init__()
        self.marks = marks
        self.num_experts = getattr(original, "num_experts", None)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.marks.called(self, x)
        if x.dim() != 2 or chosen.shape != weights.shape or chosen.shape[0] != x.shape[0]:
            raise ValueError(f"rows {list(x.shape)} and their experts {list(chosen.shape)}, {list(weights.shape)}")
        with self.marks.aside():
            y = (mixed(x, x.shape[-1]) * (1 + weights.float().sum(-1, keepdim=True))).to(x.dtype)
        return self.marks.mark(y)
