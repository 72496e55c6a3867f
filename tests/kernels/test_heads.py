"""The kernels that go head by head: rotary embedding and the write into the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import assert_close, misaligned, randn, same_bits

from quire.kernels import reference

HEADS = [(1, 1), (9, 3)]
TOKENS = [0, 1, 5, 17]
ROTARY_SHAPES = [(64, 64), (64, 32), (80, 24), (16, 6), (7, 2), (128, 128), (96, 16), (8, 0)]


def fused(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, aligned: bool) -> tuple[torch.Tensor, ...]:
    """Query, key and value as a fused projection leaves them: strided slices of one tensor."""
    sizes = [heads[0] * dim, heads[1] * dim, heads[1] * dim]
    joint = randn(tokens, sum(sizes), dtype=dtype)
    joint = joint if aligned else misaligned(joint)
    return tuple(part.unflatten(1, (-1, dim)) for part in joint.split(sizes, 1))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("dim", "rotary_dim"), ROTARY_SHAPES)
def test_rotary(
    kernels: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, rotary_dim: int, aligned: bool
) -> None:
    cos_sin = randn(50, rotary_dim, dtype=torch.float32, seed=1)
    half = rotary_dim // 2
    for tokens in TOKENS:
        query, key, value = fused(tokens, heads, dim, dtype, aligned)
        before = [query.clone(), key.clone(), value.clone()]
        positions = torch.arange(tokens).mul(7).remainder(50)
        kernels.rotary(query, key, positions, cos_sin)
        cos, sin = cos_sin.double()[positions, None].split(half, -1) if half else (cos_sin, cos_sin)
        for got, old in zip((query, key), before, strict=False):
            a, b = old.double()[..., :half], old.double()[..., half:rotary_dim]
            if half:
                error = (a.abs() + b.abs()) * (cos.abs() + sin.abs()) * 1e-6
                assert_close(got[..., :half], a * cos - b * sin, error)
                assert_close(got[..., half:rotary_dim], b * cos + a * sin, error)
            assert same_bits(got[..., rotary_dim:], old[..., rotary_dim:])
        assert same_bits(value, before[2])
        if half:
            twin = [x.clone() for x in before]
            reference.rotary(twin[0], twin[1], positions, cos_sin)
            assert same_bits(query, twin[0]) and same_bits(key, twin[1])


def test_a_position_outside_the_table_leaves_its_token(cuda: Any, dtype: torch.dtype) -> None:
    """A GPU cannot raise. The CPU's refusal is in test_arguments.py."""
    query, key = randn(5, 4, 16, dtype=dtype), randn(5, 2, 16, dtype=dtype, seed=1)
    before = [query.clone(), key.clone()]
    cos_sin = randn(9, 16, dtype=torch.float32)
    cuda.rotary(query, key, torch.tensor([-1, 3, 9, 2**62, -(2**62)]), cos_sin)
    reference.rotary(before[0][1:2], before[1][1:2], torch.tensor([3]), cos_sin)
    assert same_bits(query, before[0]) and same_bits(key, before[1])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (9, 3)])
@pytest.mark.parametrize("dim", [64, 7, 128])
@pytest.mark.parametrize("block_size", [1, 16])
def test_write_kv(
    kernels: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_size: int, aligned: bool
) -> None:
    blocks = 96 // block_size
    for tokens in (0, 1, 17):
        _, key, value = fused(tokens, heads, dim, dtype, aligned)
        slots = torch.randperm(96, generator=torch.Generator().manual_seed(tokens))[:tokens]
        pools = [torch.full((blocks, heads[1], block_size, dim), torch.nan, dtype=dtype) for _ in range(4)]
        kernels.write_kv(key, value, pools[0], pools[1], slots)
        reference.write_kv(key, value, pools[2], pools[3], slots)
        assert same_bits(pools[0], pools[2]) and same_bits(pools[1], pools[3])
        assert int(pools[0].isnan().sum()) == (96 - tokens) * heads[1] * dim


def test_a_slot_outside_the_cache_is_passed_over(cuda: Any, dtype: torch.dtype) -> None:
    """A GPU cannot raise: slots below 0 pad a batch. The CPU's refusal is in test_arguments.py."""
    key, value = randn(5, 2, 16, dtype=dtype), randn(5, 2, 16, dtype=dtype, seed=1)
    pools = [torch.zeros(6, 2, 4, 16, dtype=dtype) for _ in range(4)]
    cuda.write_kv(key, value, pools[0], pools[1], torch.tensor([-1, 24, 7, 2**62, -(2**62)]))
    reference.write_kv(key[2:3], value[2:3], pools[2], pools[3], torch.tensor([7]))
    assert same_bits(pools[0], pools[2]) and same_bits(pools[1], pools[3])
