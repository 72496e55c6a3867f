"""The kernels that go head by head: rotary embedding and the write into the cache."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import assert_close, randn, same_bits

from quire.kernels import reference

native = pytest.importorskip("quire.kernels.native")

HEADS = [(1, 1), (9, 3)]


def fused(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, key and value as a fused projection leaves them: strided slices of one tensor."""
    sizes = [heads[0] * dim, heads[1] * dim, heads[1] * dim]
    joint = randn(tokens, sum(sizes), dtype=dtype)
    return tuple(part.unflatten(1, (-1, dim)) for part in joint.split(sizes, 1))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (64, 32), (80, 24), (16, 6), (7, 2), (128, 128)])
def test_rotary(isa: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, rotary_dim: int) -> None:
    cos_sin = randn(50, rotary_dim, dtype=torch.float32, seed=1)
    half = rotary_dim // 2
    for tokens in (0, 1, 17):
        query, key, value = fused(tokens, heads, dim, dtype)
        before = [query.clone(), key.clone(), value.clone()]
        positions = torch.arange(tokens).mul(7).remainder(50)
        native.rotary(query, key, positions, cos_sin)
        cos, sin = cos_sin.double()[positions, None].split(half, -1)
        for got, old in zip((query, key), before, strict=False):
            a, b = old.double()[..., :half], old.double()[..., half:rotary_dim]
            error = (a.abs() + b.abs()) * (cos.abs() + sin.abs()) * 1e-6
            assert_close(got[..., :half], a * cos - b * sin, error)
            assert_close(got[..., half:rotary_dim], b * cos + a * sin, error)
            assert same_bits(got[..., rotary_dim:], old[..., rotary_dim:])
        assert same_bits(value, before[2])
        twin = [x.clone() for x in before]
        reference.rotary(twin[0], twin[1], positions, cos_sin)
        torch.testing.assert_close(query, twin[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(key, twin[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [64, 7])
@pytest.mark.parametrize("block_size", [1, 16])
def test_write_kv(isa: str, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_size: int) -> None:
    blocks = 96 // block_size
    for tokens in (0, 1, 17):
        _, key, value = fused(tokens, heads, dim, dtype)
        slots = torch.randperm(96, generator=torch.Generator().manual_seed(tokens))[:tokens]
        pools = [torch.full((blocks, heads[1], block_size, dim), torch.nan, dtype=dtype) for _ in range(4)]
        native.write_kv(key, value, pools[0], pools[1], slots)
        reference.write_kv(key, value, pools[2], pools[3], slots)
        assert same_bits(pools[0], pools[2]) and same_bits(pools[1], pools[3])
        assert int(pools[0].isnan().sum()) == (96 - tokens) * heads[1] * dim
