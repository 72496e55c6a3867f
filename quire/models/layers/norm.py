"""The norms. Each can first add to the residual stream, which saves a pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise residual [T, size]; with `added` [T, size], do `residual += added` first, in place."""
        weight: Any = self._parameters["weight"]
        if added is None:
            return kernels.rms_norm(residual, weight, self.eps)
        return kernels.rms_norm(added, weight, self.eps, residual)


class LayerNorm(nn.Module):
    """Layer norm (arXiv:1607.06450); without `affine` it has no parameters."""

    def __init__(self, size: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(size), requires_grad=False) if affine else None)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise residual [T, size]; with `added` [T, size], do `residual += added` first, in place."""
        parameters: Any = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if added is None:
            return kernels.layer_norm(residual, weight, bias, self.eps)
        return kernels.layer_norm(added, weight, bias, self.eps, residual)
