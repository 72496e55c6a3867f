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


def quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as int8 times one scale a row: [T, K] float64."""
    steps, scale = _steps(x.float())
    return steps.round().double() * scale


def quantized_groups(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] as int8 times a scale for every 32 columns: [T, K] float64. Each row by itself.

    Groups whose largest size is above four times the root of the row's mean square have second codes, of what the
    first ones leave out, in steps of scale / 256.
    """
    groups = x.float().unflatten(1, (-1, _GROUP))
    steps, scale = _steps(groups)
    codes = steps.round()
    rest = ((steps - codes) * 256).clamp(-127, 127).round() / 256
    outliers = groups.double().abs().amax(-1) ** 2 > 16 * x.double().pow(2).mean(-1, keepdim=True)
    return ((codes.double() + rest * outliers[..., None]) * scale).flatten(1)


def _steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., n] in steps of a scale for each n, -127 to 127; and the scales, float64."""
    size = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(size, 127)  # a division by a tensor is one, and not a product with the inverse
    inverse = torch.where(size > _LEAST_SIZE, most / size, 0)
    return (x * inverse).clamp(-127, 127), (size / most).double()


def product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x [T, K] times a quantized weight [N, K] transposed, float32 sums: [T, N]."""
    kind = weight.layout.kind
    if not is_integer(kind):
        return exact.products(x, weight.dequantize().to(x.dtype))
    if not x.shape[1]:
        return x.new_zeros((len(x), len(weight)), dtype=torch.float32)
    own = quantized_rows(x) if kind is RowKind.INT8_ROWS else quantized_groups(x)
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
