"""The norms. Each can first add to the residual stream, which saves a pass over memory, or take each head by itself.

`adapters` of a norm is what LoRA adapters change there; None while none does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.layers.adapters import NormAdapters, NormChange, adapt_norm

Size = int | tuple[int, int]


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467)."""

    adapters: NormAdapters | None = None

    def __init__(
        self, size: Size, eps: float, weight_offset: float = 0.0, affine: bool = True, added_scale: float = 1.0
    ) -> None:
        """size: of a row, or (heads, size) for heads that have each a weight of its own.

        weight_offset: added to the weight in float32 (Gemma's is 1). Without `affine`, there is no weight.
        added_scale: what is added to the residual stream is multiplied by it first.
        """
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.added_scale = added_scale
        self.register_parameter("weight", _parameter(size) if affine else None)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise residual [T, size]; with `added` [T, size], do `residual += added` first, in place.

        Of heads, [T, H, size], each is normalised by itself; without `added`. They may be a slice of a projection.
        """
        if residual.dim() == 3 and added is None:
            return self._by_head(residual)
        weight: Any = self._parameters["weight"]
        if added is None:
            y = kernels.rms_norm(residual, weight, self.eps, None, self.weight_offset)
        else:
            y = kernels.rms_norm(added, weight, self.eps, residual, self.weight_offset, self.added_scale)
        if self.adapters is not None and self.adapters.context.segments is not None:
            adapt_norm(self.adapters, residual, y, self._changed)
        return y

    def _changed(self, x: torch.Tensor, own: NormChange) -> torch.Tensor:
        weight: Any = self._parameters["weight"] if own.weight is None else own.weight
        return kernels.rms_norm(x, weight, self.eps, None, self.weight_offset)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = _heads(x), _for_heads(self._parameters["weight"])
        y = kernels.rms_norm_heads(x, weight, self.eps, self.weight_offset)
        if self.adapters is not None and self.adapters.context.segments is not None:

            def changed(x: torch.Tensor, own: NormChange) -> torch.Tensor:
                new = weight if own.weight is None else _for_heads(own.weight)
                return kernels.rms_norm_heads(x, new, self.eps, self.weight_offset)

            adapt_norm(self.adapters, x, y, changed)
        return y


class LayerNorm(nn.Module):
    """Layer norm (arXiv:1607.06450)."""

    adapters: NormAdapters | None = None

    def __init__(
        self,
        size: Size,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        weight_offset: float = 0.0,
        added_scale: float = 1.0,
    ) -> None:
        """Without `affine` it has no parameters, without `bias` a weight alone. The others are those of `RMSNorm`."""
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.added_scale = added_scale
        self.register_parameter("weight", _parameter(size) if affine else None)
        self.register_parameter("bias", _parameter(size) if affine and bias else None)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise residual [T, size]; with `added` [T, size], do `residual += added` first, in place.

        Of heads, [T, H, size], each is normalised by itself; without `added`. They may be a slice of a projection.
        """
        if residual.dim() == 3 and added is None:
            return self._by_head(residual)
        parameters: Any = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if added is None:
            y = kernels.layer_norm(residual, weight, bias, self.eps, None, self.weight_offset)
        else:
            y = kernels.layer_norm(added, weight, bias, self.eps, residual, self.weight_offset, self.added_scale)
        if self.adapters is not None and self.adapters.context.segments is not None:
            adapt_norm(self.adapters, residual, y, self._changed)
        return y

    def _changed(self, x: torch.Tensor, own: NormChange) -> torch.Tensor:
        return kernels.layer_norm(x, own.weight, own.bias, self.eps, None, self.weight_offset)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        x = _heads(x)
        weight, bias = _for_heads(self._parameters["weight"]), _for_heads(self._parameters["bias"])
        y = kernels.layer_norm_heads(x, weight, bias, self.eps, self.weight_offset)
        if self.adapters is not None and self.adapters.context.segments is not None:

            def changed(x: torch.Tensor, own: NormChange) -> torch.Tensor:
                new = _for_heads(own.weight), _for_heads(own.bias)
                return kernels.layer_norm_heads(x, *new, self.eps, self.weight_offset)

            adapt_norm(self.adapters, x, y, changed)
        return y


def _parameter(size: Size) -> nn.Parameter:
    return nn.Parameter(torch.empty(size), requires_grad=False)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, size] whose heads lie one behind the other, as kernels take them; of another order, a copy."""
    return x if x.stride(1) == x.shape[2] or x.shape[1] == 1 else x.contiguous()


def _for_heads(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """[1, size] where all heads have the same, else [H, size]."""
    return parameter if parameter is None or parameter.dim() == 2 else parameter.unsqueeze(0)
