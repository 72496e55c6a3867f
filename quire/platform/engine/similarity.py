"""How near vectors are to one another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.pooling_types import PoolingSpec

if TYPE_CHECKING:
    import torch


def comparison(spec: PoolingSpec) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """How an embedder's vectors are compared."""
    if spec.kind == "splade":
        return product
    return max_sim if spec.has_many_rows else cosine


def product(first: torch.Tensor, second: torch.Tensor) -> float:
    """Of two vectors [N], in float64."""
    return float((first.double() * second.double()).sum())


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Of two vectors [N], in float64; 0 where one is all zeros."""
    a, b = first.double(), second.double()
    length = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / length if length else 0.0


def max_sim(first: torch.Tensor, second: torch.Tensor) -> float:
    """Late interaction (arXiv:2004.12832): for each of the first's rows [T1, N] its largest product with one of the
    second's rows [T2, N], all added up, in float64."""
    products = first.double() @ second.double().T
    return float(products.max(dim=1).values.sum()) if products.numel() else 0.0
