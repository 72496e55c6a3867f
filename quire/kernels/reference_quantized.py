"""The reference's kernels about quantized weights (see `reference.py`)."""

from __future__ import annotations

import torch

from quire.kernels import exact
from quire.kernels.quantized import QuantizedWeight, RowKind

# What is multiplied as whole numbers, and in groups of so many columns.
_ELEMENTS = (RowKind.F32, RowKind.F16, RowKind.BF16)
_GROUP = 32
_LEAST_SIZE = 2.0**-100
# Rows of a weight that are unpacked at a time.
_MOST_ROWS = 1024


def is_integer(kind: RowKind) -> bool:
    """Whether rows of a kind are multiplied as whole numbers, by x in int8."""
    return kind not in _ELEMENTS and kind <= RowKind.INT8_ROWS


def quantize_tokens(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [T, K] as int8 times scales, by groups of so many columns: [T, K] float64. Each group by itself."""
    groups = x.float().reshape(len(x), x.shape[1] // group, group)
    size = groups.abs().amax(-1, keepdim=True)
    most = torch.full_like(size, 127)  # a division by a tensor is one, and not a product with the inverse
    inverse = torch.where(size > _LEAST_SIZE, most / size, 0)
    codes = (groups * inverse).clamp(-127, 127).round()
    return (codes.double() * (size / most).double()).reshape(x.shape)


def product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x [T, K] times a quantized weight [N, K] transposed, float32 sums: [T, N]."""
    kind = weight.layout.kind
    if not is_integer(kind):
        return exact.products(x, weight.dequantize().to(x.dtype))
    if not x.shape[1]:
        return x.new_zeros((len(x), len(weight)), dtype=torch.float32)
    own = quantize_tokens(x, x.shape[1] if kind is RowKind.INT8_ROWS else _GROUP)
    parts = [
        exact.products(own, weight.dequantize(first, first + _MOST_ROWS).double())
        for first in range(0, len(weight), _MOST_ROWS)
    ]
    return torch.cat([own.new_zeros((len(x), 0), dtype=torch.float32), *parts], dim=1)


def quantized_embedding(
    ids: torch.Tensor,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    added: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    rows = QuantizedWeight(weight.data[ids], weight.layout, weight.aux).dequantize() * scale
    return (rows if added is None else rows + added.float()).to(dtype)
