"""Sums and functions in plain torch whose bits depend on their arguments alone, on any processor and any BLAS.

A BLAS chooses the order of a sum by the shape of the call and by where in it a row stands, and torch computes the last
elements of a buffer otherwise than the rest. So neither has the last word here. What they make in float64 lies within a
known distance of the exact value. Where everything within it rounds to one float32, that is the result, whichever way
it was made; where it does not, which is seldom, Python decides: `math.fsum` rounds the exact sum, and a function of
`math` has one result for one number. Beside these, only operations are used that IEEE 754 defines to the last bit.

It rests on this: float64 products and sums of a BLAS are rounded each, in any order, fused or not; and torch's float64
functions are right to 2^-46 of their value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_UNIT = 2.0**-52  # twice what one rounding to float64 may lose
_ROUGH = 2.0**-46
# Elements of an operand that are widened at a time.
_MOST = 1 << 22

Places = torch.Tensor  # [n, dimensions] int64: where a tensor's element stands


def products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., T, K] times weight [..., N, K] transposed: [..., T, N] float32, each the exact sum, rounded.

    Of any floating-point dtypes up to float32; the leading dimensions, if any, are the same.
    """
    columns = max(1, _MOST // max(1, weight.numel() // max(1, weight.shape[-2])))
    grain = torch.finfo(x.dtype).eps * torch.finfo(weight.dtype).eps / 4
    wide = x.double()
    lengths = _length(wide).unsqueeze(-1)
    parts = [_products(wide, lengths, part.double(), grain) for part in weight.split(columns, dim=-2)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _products(x: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor, grain: float) -> torch.Tensor:
    # A sum's error is at most K roundings of the sum of the magnitudes, and that (Cauchy-Schwarz) is at most the
    # product of the lengths.
    bound = lengths * (_length(weight) * ((x.shape[-1] + 8) * _UNIT)).unsqueeze(-2)

    def exactly(places: Places) -> torch.Tensor:
        *outer, row, column = places.unbind(1)
        return _sums(x[(*outer, row)] * weight[(*outer, column)], grain)

    return _settled(x @ weight.mT, bound, exactly, x.shape[-1])


def totals(terms: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension of terms [..., K] float64: [...] float32, each the exact sum, rounded."""
    size = terms.shape[-1]
    bound = terms.abs().sum(-1) * ((size + 8) * _UNIT)
    return _settled(terms.sum(-1), bound, lambda places: _sums(terms[places.unbind(1)], 0.0), size)


def _sums(terms: torch.Tensor, grain: float) -> torch.Tensor:
    """The exact sums of terms [n, K] float64, [n] float64, rounded; a term is a multiple of `grain` times its size.

    16-bit numbers seldom differ so much that float64 cannot hold the sums of their products: then any order is exact.
    """
    sizes = terms.abs()
    least = sizes.masked_fill(sizes == 0, torch.inf).amin(-1)
    result, whole = terms.sum(-1), sizes.sum(-1) < least * (grain * 2.0**52)
    for row in (~whole).nonzero().flatten().tolist():
        result[row] = math.fsum(terms[row].tolist())
    return result


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x of float64, rounded to float32."""
    return _function(torch.exp, math.exp, x)


def expm1(x: torch.Tensor) -> torch.Tensor:
    """e^x - 1 of float64, rounded to float32."""
    return _function(torch.expm1, math.expm1, x)


def erfc(x: torch.Tensor) -> torch.Tensor:
    """1 - erf(x) of float64, rounded to float32."""
    return _function(torch.erfc, math.erfc, x)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x) of float64, rounded to float32."""
    return _function(torch.rsqrt, lambda value: 1 / math.sqrt(value), x)


def _function(
    roughly: Callable[[torch.Tensor], torch.Tensor], exactly: Callable[[float], float], x: torch.Tensor
) -> torch.Tensor:
    y = roughly(x)

    def all_exactly(places: Places) -> torch.Tensor:
        return torch.tensor([exactly(value) for value in x[places.unbind(1)].tolist()], dtype=torch.float64)

    return _settled(y, y.abs() * _ROUGH, all_exactly)


def _settled(
    y: torch.Tensor, bound: torch.Tensor, exactly: Callable[[Places], torch.Tensor], size: int = 1
) -> torch.Tensor:
    """y float64 as float32; what lies so near to a boundary that `bound` reaches across it is what `exactly` says.

    What is no number, or infinite, has no bound and stays. size: the terms of each.
    """
    result = (y + bound).float()
    unsure = (y - bound).float() != result
    result += 0.0  # no BLAS makes the sign of a zero
    if unsure.any():
        endless = ~bound.isfinite()
        result[endless] = y[endless].float()
        for places in (unsure & ~endless).nonzero().split(max(1, _MOST // max(1, size))):
            result[places.unbind(1)] = (exactly(places) + 0.0).float().to(y.device)
    return result


def _length(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1)
