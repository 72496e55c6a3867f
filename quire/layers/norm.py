"""The norms. Each can first add to the residual stream, which saves a pass over memory, or take each head by itself.

`adapters` of a norm is what LoRA adapters change there; None while none does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.layers.adapters import NormAdapters, adapt_norm
from quire.layers.rows import repeated


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467)."""

    adapters: NormAdapters | None = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise residual [T, size]; with `added` [T, size], do `residual += added` first, in place.

        Of heads, [T, H, size], each is normalised by itself; without `added`.
        """
        if residual.dim() == 3 and added is None:
            return _by_head(self, residual)
        weight: Any = self._parameters["weight"]
        if added is None:
            y = kernels.rms_norm(residual, weight, self.eps)
        else:
            y = kernels.rms_norm(added, weight, self.eps, residual)
        if self.adapters is not None and self.adapters.context.segments is not None:
            adapt_norm(
                self.adapters,
                residual,
                y,
                lambda x, own: kernels.rms_norm(x, weight if own.weight is None else own.weight, self.eps),
            )
        return y


class LayerNorm(nn.Module):
    """Layer norm (arXiv:1607.06450); without `affine` it has no parameters."""

    adapters: NormAdapters | None = None

    def __init__(self, size: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(size), requires_grad=False) if affine else None)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise residual [T, size]; with `added` [T, size], do `residual += added` first, in place.

        Of heads, [T, H, size], each is normalised by itself; without `added`.
        """
        if residual.dim() == 3 and added is None:
            return _by_head(self, residual)
        parameters: Any = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if added is None:
            y = kernels.layer_norm(residual, weight, bias, self.eps)
        else:
            y = kernels.layer_norm(added, weight, bias, self.eps, residual)
        if self.adapters is not None and self.adapters.context.segments is not None:
            adapt_norm(self.adapters, residual, y, lambda x, own: kernels.layer_norm(x, own.weight, own.bias, self.eps))
        return y


def _by_head(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x [T, H, size]: a token's heads are one behind the other, and its adapter's."""
    with repeated(x.shape[1]):
        y: torch.Tensor = norm(x.reshape(-1, x.shape[2]))
    return y.view(x.shape)
