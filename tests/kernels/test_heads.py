"""The kernels that go head by head: norms, rotary embedding and the write into the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import assert_close, exact_norm, misaligned, randn, same_bits

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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "first"),
    [
        (64, 64, 0),
        (128, 64, 0),
        (192, 64, 128),
        (80, 24, 0),
        (96, 32, 5),
        (7, 2, 4),
        (16, 6, 10),
        (100, 50, 3),
        (8, 0, 8),
    ],
)
def test_rotary_of_some_dimensions(
    kernels: Any, dtype: torch.dtype, dim: int, rotary_dim: int, first: int, interleaved: bool
) -> None:
    cos_sin, half = randn(50, rotary_dim, dtype=torch.float32, seed=1), rotary_dim // 2
    places = torch.arange(rotary_dim) + first
    places = places.view(half, 2) if interleaved else places.view(2, half).t()  # [pairs, 2]
    for tokens, heads, aligned in ((0, (1, 1), True), (1, (9, 3), True), (17, (4, 1), True), (5, (9, 3), False)):
        query, key, value = fused(tokens, heads, dim, dtype, aligned)
        before = [query.clone(), key.clone(), value.clone()]
        positions = torch.arange(tokens).mul(7).remainder(50)
        kernels.rotary(query, key, positions, cos_sin, interleaved, first)
        cos, sin = cos_sin.double()[positions, None].split(half, -1) if half else (cos_sin, cos_sin)
        for got, old in zip((query, key), before, strict=False):
            if half:
                a, b = old.double()[..., places].unbind(-1)
                error = (a.abs() + b.abs()) * (cos.abs() + sin.abs()) * 1e-6
                assert_close(got[..., places[:, 0]], a * cos - b * sin, error)
                assert_close(got[..., places[:, 1]], b * cos + a * sin, error)
            for rest in (slice(0, first), slice(first + rotary_dim, None)):
                assert same_bits(got[..., rest], old[..., rest])
        assert same_bits(value, before[2])
        twin, alone = before[0].clone(), before[0].clone()
        reference.rotary(twin, None, positions, cos_sin, interleaved, first)
        kernels.rotary(alone, None, positions, cos_sin, interleaved, first)
        assert same_bits(query, twin) and same_bits(alone, twin)


@pytest.mark.parametrize(("dim", "offset"), [(1, 0.0), (7, 1.0), (64, 1.0), (128, 0.0), (250, 0.0)])
def test_norms_of_heads(kernels: Any, dtype: torch.dtype, dim: int, offset: float) -> None:
    """Of a slice of a projection, without a copy: bit by bit the norm of its rows; weights of all heads, or of each."""
    for tokens, heads, aligned in ((0, (1, 1), True), (1, (9, 3), False), (17, (4, 1), True), (5, (3, 2), False)):
        for x in fused(tokens, heads, dim, dtype, aligned)[:2]:
            before, count = x.clone(), x.shape[1]
            for own in (1, count):
                check_norms_of_heads(kernels, x, randn(own, dim, dtype=dtype, seed=1), offset)
            assert same_bits(x, before)


def check_norms_of_heads(kernels: Any, x: torch.Tensor, weight: torch.Tensor, offset: float) -> None:
    count, rows = x.shape[1], x.reshape(-1, x.shape[2])
    bias = randn(*weight.shape, dtype=weight.dtype, seed=2)
    got = kernels.rms_norm_heads(x, weight, 1e-5, offset)
    exact = exact_norm(x, 1e-5, False) * (weight.double() + offset)
    assert_close(got, exact, exact.abs() * 1e-6)
    centred = kernels.layer_norm_heads(x, weight, bias, 1e-5, offset)
    assert got.is_contiguous() and centred.is_contiguous()
    for h in range(count):
        w, b, mine = weight[h % len(weight)], bias[h % len(bias)], slice(h, None, count)
        assert same_bits(got[:, h], kernels.rms_norm(rows, w, 1e-5, None, offset)[mine])
        assert same_bits(centred[:, h], kernels.layer_norm(rows, w, b, 1e-5, None, offset)[mine])
    ones = torch.ones_like(weight)
    assert same_bits(kernels.rms_norm_heads(x, None, 1e-5), kernels.rms_norm_heads(x, ones, 1e-5))
    bare, whole = (kernels.layer_norm_heads(x, one, None, 1e-5) for one in (None, ones))
    assert same_bits(bare, whole)


def test_a_norm_over_all_heads_takes_a_slice(kernels: Any, dtype: torch.dtype) -> None:
    """OLMo 2's: over the whole width of query or key, where they lie in the projection."""
    for aligned in (True, False):
        for x in fused(5, (9, 3), 40, dtype, aligned)[:2]:
            weight = randn(x.shape[1] * 40, dtype=dtype, seed=1)
            got = kernels.rms_norm(x.flatten(1), weight, 1e-6)
            assert x.flatten(1).data_ptr() == x.data_ptr()
            exact = exact_norm(x.flatten(1), 1e-6, False) * weight.double()
            assert_close(got, exact, exact.abs() * 1e-6)


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


@pytest.mark.parametrize(("first", "second"), [(16, 8), (512, 64), (21, 6), (8, 0), (1, 1), (7, None)])
def test_join_heads(kernels: Any, dtype: torch.dtype, first: int, second: int | None) -> None:
    """Of heads that lie anywhere: a slice of a projection's, all tokens of a head side by side, one head of all."""
    for tokens, heads in [(0, 3), (1, 4), (5, 3), (33, 16)]:
        both = randn(tokens, heads, first + (second or 0) + 1, dtype=dtype)
        by_head = randn(heads, tokens, first, dtype=dtype, seed=1).transpose(0, 1)
        for one in (both[..., 1 : 1 + first], by_head, both[:, :1, :first].expand(tokens, heads, first)):
            other = None if second is None else both[..., first : first + second]
            want = torch.cat([one] if other is None else [one, other], -1)
            got = kernels.join_heads(one, other)
            assert got.is_contiguous() and same_bits(got, want)
            assert same_bits(reference.join_heads(one, other), want)
        turned = kernels.join_heads(by_head.transpose(0, 1))
        assert list(turned.shape) == [heads, tokens, first] and same_bits(turned.transpose(0, 1), by_head)
