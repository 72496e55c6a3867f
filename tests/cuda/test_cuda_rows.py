"""The GPU's kernels that go row by row (norms, embedding, activations, rotary embedding) against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from quire.kernels import ACTIVATION_KINDS, reference
from tests.kernels.kernel_helpers import assert_close, misaligned, randn, same_bits, strided_rows

CHANNELS = [1, 16, 49, 1000, 2304]
TOKENS = [0, 1, 5]
Layout = Callable[[torch.Tensor], torch.Tensor]


def wide_rows(x: torch.Tensor) -> torch.Tensor:
    """x as a slice of wider rows that can be read 16 bytes at a time, with NaN on both sides."""
    wide = torch.full((x.shape[0], x.shape[1] + 64), torch.nan, dtype=x.dtype)
    return wide[:, 32 : 32 + x.shape[1]].copy_(x)


@pytest.fixture(params=[torch.clone, misaligned, strided_rows, wide_rows])
def layout(request: pytest.FixtureRequest) -> Layout:
    """How the rows of an input lie."""
    return request.param


def exact_norm(x: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
    wide = x.double()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(cuda: ModuleType, dtype: torch.dtype, layout: Layout, channels: int, with_residual: bool) -> None:
    weight = randn(channels, dtype=dtype, seed=1)
    for tokens in TOKENS:
        x = layout(randn(tokens, channels, dtype=dtype, seed=2))
        residual = randn(tokens, channels, dtype=dtype, seed=3) if with_residual else None
        total = x if residual is None else residual + x
        got = cuda.rms_norm(x, weight, 1e-5, residual)
        exact = exact_norm(total, 1e-5, False) * weight.double()
        assert_close(got, exact, exact.abs() * 1e-6)
        assert residual is None or same_bits(residual, total)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("with_weight", "with_bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm(
    cuda: ModuleType, dtype: torch.dtype, channels: int, with_residual: bool, with_weight: bool, with_bias: bool
) -> None:
    weight = randn(channels, dtype=dtype, seed=1) if with_weight else None
    bias = misaligned(randn(channels, dtype=dtype, seed=4)) if with_bias else None
    for tokens, place in zip(TOKENS, (torch.clone, torch.clone, wide_rows), strict=True):
        x = place(randn(tokens, channels, dtype=dtype, seed=2) + 3)
        residual = randn(tokens, channels, dtype=dtype, seed=3) if with_residual else None
        total = x if residual is None else residual + x
        got = cuda.layer_norm(x, weight, bias, 1e-5, residual)
        exact = exact_norm(total, 1e-5, True)
        # The mean's rounding, as seen after the division by the deviation.
        centred = total.double() - total.double().mean(-1, keepdim=True)
        spread = centred.pow(2).mean(-1, keepdim=True).sqrt()
        error = 4e-6 / (spread + math.sqrt(1e-5)) + 2e-6 * exact.abs()
        if weight is not None:
            exact, error = exact * weight.double(), error * weight.double().abs()
        if bias is not None:
            exact = exact + bias.double()
        assert_close(got, exact, error + 1e-6)
        assert residual is None or same_bits(residual, total)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("place", [torch.clone, misaligned])
@pytest.mark.parametrize("with_added", [False, True])
def test_embedding(cuda: ModuleType, dtype: torch.dtype, place: Layout, channels: int, with_added: bool) -> None:
    table = place(randn(50, channels, dtype=dtype))
    for tokens in TOKENS:
        ids = torch.arange(tokens).mul(7).remainder(50)
        added = randn(tokens, channels, dtype=dtype, seed=1) if with_added else None
        got = cuda.embedding(ids, table, added)
        assert same_bits(got, table[ids] if added is None else table[ids] + added)


@pytest.mark.parametrize("with_added", [False, True])
def test_an_id_outside_the_table_reads_as_zeros(cuda: ModuleType, dtype: torch.dtype, with_added: bool) -> None:
    table = randn(7, 40, dtype=dtype)
    ids = torch.tensor([3, -1, 7, 6, 2**62, -(2**62), 0])
    added = randn(7, 40, dtype=dtype, seed=1) if with_added else None
    rows = torch.where((ids >= 0).logical_and(ids < 7)[:, None], table[ids.clamp(0, 6)], torch.zeros((), dtype=dtype))
    assert same_bits(cuda.embedding(ids, table, added), rows if added is None else rows + added)


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activation_over_the_whole_range(cuda: ModuleType, dtype: torch.dtype, kind: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-30])
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-3, 3, 4001), special]).to(dtype)[None]
    exact = EXACT[kind](x.double())
    got = cuda.activation(x, kind)
    # Below -5 the functions fall off faster than their float32 argument is exact.
    assert_close(got, exact, exact.abs() * 2e-5 + x.double().abs() * 1e-12 + 1e-38)
    near = x.abs() < 5
    assert_close(got[near], exact[near], exact[near].abs() * 4e-6)
    torch.testing.assert_close(got, reference.activation(x, kind), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("channels", [1, 17, 104, 2304])
def test_activation(cuda: ModuleType, dtype: torch.dtype, layout: Layout, kind: str, channels: int) -> None:
    for tokens in TOKENS:
        x = layout(randn(tokens, 2 * channels, dtype=dtype))
        exact = EXACT[kind](x[:, :channels].double()) * x[:, channels:].double()
        assert_close(cuda.activation_and_mul(x, kind), exact, exact.abs() * 4e-6)
        assert_close(cuda.activation(x, kind), EXACT[kind](x.double()), x.double().abs() * 1e-6)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_nan_is_kept(cuda: ModuleType, dtype: torch.dtype, kind: str) -> None:
    x = torch.full((1, 24), torch.nan, dtype=dtype)
    x[0, ::2] = 1.0
    assert torch.equal(cuda.activation(x, kind).isnan(), x.isnan())


ROTARY_SHAPES = [(64, 64), (64, 32), (80, 24), (16, 6), (7, 2), (128, 128), (96, 16), (8, 0)]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3)])
@pytest.mark.parametrize(("dim", "rotary_dim"), ROTARY_SHAPES)
def test_rotary(
    cuda: ModuleType, dtype: torch.dtype, heads: tuple[int, int], dim: int, rotary_dim: int, aligned: bool
) -> None:
    cos_sin = randn(50, rotary_dim, dtype=torch.float32, seed=1)
    half = rotary_dim // 2
    for tokens in TOKENS:
        # As a fused projection leaves them: slices of one tensor.
        sizes = [heads[0] * dim, heads[1] * dim, heads[1] * dim]
        joint = randn(tokens, sum(sizes), dtype=dtype)
        joint = joint if aligned else misaligned(joint)
        query, key, value = (part.unflatten(1, (-1, dim)) for part in joint.split(sizes, 1))
        before = [query.clone(), key.clone(), value.clone()]
        positions = torch.arange(tokens).mul(7).remainder(50)
        cuda.rotary(query, key, positions, cos_sin)
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
            reference.rotary(before[0], before[1], positions, cos_sin)
            assert same_bits(query, before[0]) and same_bits(key, before[1])


def test_a_position_outside_the_table_leaves_its_token(cuda: ModuleType, dtype: torch.dtype) -> None:
    query, key = randn(5, 4, 16, dtype=dtype), randn(5, 2, 16, dtype=dtype, seed=1)
    before = [query.clone(), key.clone()]
    cos_sin = randn(9, 16, dtype=torch.float32)
    cuda.rotary(query, key, torch.tensor([-1, 3, 9, 2**62, -(2**62)]), cos_sin)
    reference.rotary(before[0][1:2], before[1][1:2], torch.tensor([3]), cos_sin)
    assert same_bits(query, before[0]) and same_bits(key, before[1])


def test_a_row_does_not_depend_on_its_company(cuda: ModuleType, order: int, dtype: torch.dtype) -> None:
    x = randn(40, 336, dtype=dtype)
    weight, bias = randn(336, dtype=dtype, seed=1), randn(336, dtype=dtype, seed=2)
    positions, cos_sin = torch.arange(40), randn(40, 42, dtype=torch.float32, seed=3)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), 8, 42).clone()
        cuda.rotary(heads, heads[:, :0], positions[: len(x)], cos_sin[:1].expand(40, -1).contiguous())
        return heads

    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: cuda.rms_norm(x, weight, 1e-6),
        lambda x: cuda.rms_norm(x, weight, 1e-6, x.clone()),
        lambda x: cuda.layer_norm(x, weight, bias, 1e-6),
        lambda x: cuda.activation(x, "gelu"),
        lambda x: cuda.activation_and_mul(x, "silu"),
        rotated,
    ]
    for call in calls:
        together = call(x)
        for first, last in ((0, 1), (7, 9), (20, 39), (39, 40)):
            assert same_bits(call(x[first:last]), together[first:last])
