"""The linear layers. Every matrix product of every model goes through this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.layers.adapters import LinearAdapters, adapted_product


class Linear(nn.Module):
    """y = x W^T + b, with weight [out_features, in_features] as the checkpoint has it.

    adapters: what LoRA adapters change here; None while none does.
    """

    adapters: LinearAdapters | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features], in `out_dtype` (x's by default)."""
        parameters: Any = self._parameters  # torch's own attribute look-up costs more than a small product
        weights, biases, adapters = (parameters["weight"],), (parameters["bias"],), self.adapters
        if adapters is None or adapters.active.segments is None:
            return kernels.linear(x, weights, biases, out_dtype)
        return adapted_product(x, weights, biases, out_dtype, (adapters,), adapters)


class MergedLinear:
    """Several Linear layers of one input as one product, without a second copy of their weights.

    It is no module: the parameters stay where the checkpoint names them, and this only looks at them.
    """

    def __init__(self, *linears: Linear) -> None:
        self.linears = linears

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, sum of out_features], the layers' results side by side."""
        parameters: list[Any] = [linear._parameters for linear in self.linears]
        weights, biases = [p["weight"] for p in parameters], [p["bias"] for p in parameters]
        for linear in self.linears:
            adapters = linear.adapters
            if adapters is not None and adapters.active.segments is not None:
                return adapted_product(x, weights, biases, None, [one.adapters for one in self.linears], adapters)
        return kernels.linear(x, weights, biases)
