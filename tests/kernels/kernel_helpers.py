"""What several kernel tests share."""

from __future__ import annotations

from typing import Any

import torch

# Half a unit in the last place, relative: the error of rounding the exact result once.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def is_gpu(kernels: Any) -> bool:
    """Whether a back end is the GPU's, emulated or not."""
    return hasattr(kernels, "sample")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """x at an address that is a multiple of its element size and of nothing more, NaN around it."""
    buffer = torch.full((x.numel() + 66,), torch.nan, dtype=x.dtype)
    start = next(i for i in range(1, 33) if (buffer.data_ptr() // x.element_size() + i) % 2)
    copy = buffer[start : start + x.numel()].view(x.shape)
    return copy.copy_(x)


def strided_rows(x: torch.Tensor) -> torch.Tensor:
    """x as a slice of wider rows, with NaN on both sides."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), torch.nan, dtype=x.dtype)
    return wide[:, 5 : 5 + x.shape[1]].copy_(x)


def wide_rows(x: torch.Tensor) -> torch.Tensor:
    """x as a slice of wider rows that can be read 16 bytes at a time, with NaN on both sides."""
    wide = torch.full((x.shape[0], x.shape[1] + 64), torch.nan, dtype=x.dtype)
    return wide[:, 32 : 32 + x.shape[1]].copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int32 if a.dtype is torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_close(got: torch.Tensor, exact: torch.Tensor, error: float | torch.Tensor = 0.0) -> None:
    """|got - exact| <= error + what rounding to got's dtype may add (with room for two roundings)."""
    assert got.shape == exact.shape
    tiny = {torch.float32: 1e-44, torch.bfloat16: 1e-37, torch.float16: 6e-8}[got.dtype]
    limit = error + (error + exact.abs()) * ROUNDING[got.dtype] * 2.01 + tiny
    excess = (got.double() - exact).abs() - limit
    assert not got.isnan().any(), f"{int(got.isnan().sum())} elements are NaN"
    assert (excess <= 0).all(), f"worst excess {excess.max().item():.3g} over a limit of {limit.max().item():.3g}"


def exact_norm(x: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
    """RMSNorm, or LayerNorm, of the last dimension, without weight and bias: float64."""
    wide = x.double()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
