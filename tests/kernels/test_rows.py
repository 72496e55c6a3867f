"""The kernels that go row by row (norms, embedding, activations) against float64 and against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kernel_helpers import assert_close, exact_norm, is_gpu, misaligned, randn, same_bits, strided_rows, wide_rows

from quire.kernels import ACTIVATION_KINDS, reference

CHANNELS = [1, 2, 15, 16, 49, 64, 65, 1000, 2304]
TOKENS = [0, 1, 5, 9]
Layout = Callable[[torch.Tensor], torch.Tensor]


# How the rows of an input lie.
LAYOUTS: list[Layout] = [torch.clone, misaligned, strided_rows, wide_rows]


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("place", [torch.clone, misaligned])
@pytest.mark.parametrize("with_added", [False, True])
def test_embedding(kernels: Any, dtype: torch.dtype, place: Layout, channels: int, with_added: bool) -> None:
    table = place(randn(50, channels, dtype=dtype))
    for tokens in TOKENS if is_gpu(kernels) else (*TOKENS, 700):
        ids = torch.arange(tokens).mul(7).remainder(50)
        added = randn(tokens, channels, dtype=dtype, seed=1) if with_added else None
        got = kernels.embedding(ids, table, added)
        assert same_bits(got, table[ids] if added is None else table[ids] + added)
        assert same_bits(got, reference.embedding(ids, table, added))


@pytest.mark.parametrize("channels", [1, 16, 1001])
def test_embedding_with_a_scale(kernels: Any, dtype: torch.dtype, channels: int) -> None:
    table, ids = misaligned(randn(50, channels, dtype=dtype)), torch.arange(9).mul(7).remainder(50)
    for added in (None, randn(9, channels, dtype=dtype, seed=1)):
        got = kernels.embedding(ids, table, added, 1.7)
        exact = table[ids].double() * 1.7 + (0 if added is None else added.double())
        assert_close(got, exact, (table[ids].double().abs() + exact.abs()) * 2e-7)
        assert same_bits(got, reference.embedding(ids, table, added, 1.7))
        assert same_bits(kernels.embedding(ids[4:6], table, None if added is None else added[4:6], 1.7), got[4:6])
        assert same_bits(kernels.embedding(ids, table, added, 1.0), kernels.embedding(ids, table, added))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("place", [torch.clone, misaligned])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(kernels: Any, dtype: torch.dtype, place: Layout, channels: int, with_residual: bool) -> None:
    weight = place(randn(channels, dtype=dtype, seed=1))
    for tokens in TOKENS:
        plain = randn(tokens, channels, dtype=dtype, seed=2)
        first = randn(tokens, channels, dtype=dtype, seed=3) if with_residual else None
        total = plain if first is None else first + plain
        exact = exact_norm(total, 1e-5, False) * weight.double()
        for layout in LAYOUTS:
            residual = None if first is None else first.clone()
            assert_close(kernels.rms_norm(layout(plain), weight, 1e-5, residual), exact, exact.abs() * 1e-6)
            assert residual is None or same_bits(residual, total)
        # The reference's own error is of the same order.
        assert_close(reference.rms_norm(total, weight, 1e-5), exact, exact.abs() * 1e-6)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("with_weight", "with_bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm(
    kernels: Any, dtype: torch.dtype, channels: int, with_residual: bool, with_weight: bool, with_bias: bool
) -> None:
    weight = randn(channels, dtype=dtype, seed=1) if with_weight else None
    biases = [place(randn(channels, dtype=dtype, seed=4)) if with_bias else None for place in (torch.clone, misaligned)]
    for tokens, place in zip(TOKENS, (torch.clone, strided_rows, wide_rows, strided_rows), strict=True):
        x = place(randn(tokens, channels, dtype=dtype, seed=2) + 3)
        first = randn(tokens, channels, dtype=dtype, seed=3) if with_residual else None
        total = x if first is None else first + x
        exact = exact_norm(total, 1e-5, True)
        # The mean's rounding, as seen after the division by the deviation.
        centred = total.double() - total.double().mean(-1, keepdim=True)
        spread = centred.pow(2).mean(-1, keepdim=True).sqrt()
        error = 4e-6 / (spread + math.sqrt(1e-5)) + 2e-6 * exact.abs()
        if weight is not None:
            exact, error = exact * weight.double(), error * weight.double().abs()
        if biases[0] is not None:
            exact = exact + biases[0].double()
        for bias in biases:
            residual = None if first is None else first.clone()
            got = kernels.layer_norm(x, weight, bias, 1e-5, residual)
            assert_close(got, exact, error + 1e-6)
            assert residual is None or same_bits(residual, total)
        torch.testing.assert_close(got, reference.layer_norm(total, weight, bias, 1e-5), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("channels", [1, 16, 1001])
def test_a_norm_s_offset_and_multiplier(kernels: Any, dtype: torch.dtype, name: str, channels: int) -> None:
    """1 + weight is added up in float32, where a small weight of a 16-bit dtype is not lost."""
    weight = (randn(channels, dtype=torch.float32, seed=1) * 2.0**-9).to(dtype)
    norm, twin = getattr(kernels, name), getattr(reference, name)
    parameters = (weight, None) if name == "layer_norm" else (weight,)
    for tokens in TOKENS:
        x, first = randn(tokens, channels, dtype=dtype, seed=2) + 3, randn(tokens, channels, dtype=dtype, seed=3)
        scaled = (first.float() + x.float() * 0.22).to(dtype)  # rounded once
        for layout in LAYOUTS:
            for residual, total in ((None, x), (first.clone(), scaled)):
                exact = exact_norm(total, 1e-5, name == "layer_norm") * (1.0 + weight.double())
                got = norm(layout(x), *parameters, 1e-5, residual, 1.0, 0.22)
                assert_close(got, exact, exact.abs() * 2e-6 + (5e-4 if name == "layer_norm" else 0))
                assert residual is None or same_bits(residual, scaled)
        with_multiplier = first.clone()
        torch.testing.assert_close(got, twin(x, *parameters, 1e-5, with_multiplier, 1.0, 0.22), rtol=2e-2, atol=2e-2)
        assert same_bits(with_multiplier, scaled)
        plain = norm(x, *parameters, 1e-5, first.clone())
        assert same_bits(norm(x, *parameters, 1e-5, first.clone(), 0.0, 1.0), plain)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_no_offset_leaves_the_sign_of_a_zero(kernels: Any, dtype: torch.dtype, name: str) -> None:
    x, weight = randn(3, 40, dtype=dtype), torch.full((40,), -0.0, dtype=dtype)
    parameters = (weight, None) if name == "layer_norm" else (weight,)
    got = getattr(kernels, name)(x, *parameters, 1e-5)
    assert torch.equal(got.signbit(), getattr(reference, name)(x, *parameters, 1e-5).signbit())
    assert got.signbit().any() and not got.signbit().all()


def test_rms_norm_without_a_weight(kernels: Any, dtype: torch.dtype) -> None:
    for channels in CHANNELS:
        x, ones = randn(5, channels, dtype=dtype), torch.ones(channels, dtype=dtype)
        assert same_bits(kernels.rms_norm(x, None, 1e-5), kernels.rms_norm(x, ones, 1e-5))


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: torch.relu(x).square(),
    "relu6": torch.nn.functional.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": torch.nn.functional.mish,
}


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activation_over_the_whole_range(kernels: Any, dtype: torch.dtype, kind: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-30])
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-3, 3, 4001), special]).to(dtype)[None]
    exact = EXACT[kind](x.double())
    got = kernels.activation(x, kind)
    # Below -5 the functions fall off faster than their float32 argument is exact.
    assert_close(got, exact, exact.abs() * 2e-5 + x.double().abs() * 1e-12 + 1e-38)
    near = x.abs() < 5
    assert_close(got[near], exact[near], exact[near].abs() * 4e-6)
    torch.testing.assert_close(got, reference.activation(x, kind), rtol=1e-2, atol=1e-5)


WIDTHS = [1, 15, 16, 17, 100, 104, 1000, 2304]


@pytest.mark.parametrize(
    ("kind", "channels"),
    [(kind, width) for i, kind in enumerate(ACTIVATION_KINDS) for width in (WIDTHS if i < 5 else (15, 104))],
)
def test_activation(kernels: Any, dtype: torch.dtype, kind: str, channels: int) -> None:
    for tokens in TOKENS:
        plain = randn(tokens, 2 * channels, dtype=dtype)
        exact = EXACT[kind](plain[:, :channels].double()) * plain[:, channels:].double()
        exact_alone = EXACT[kind](plain.double())
        for layout in LAYOUTS:
            x = layout(plain)
            got = kernels.activation_and_mul(x, kind)
            assert_close(got, exact, exact.abs() * 4e-6)
            assert_close(kernels.activation(x, kind), exact_alone, plain.double().abs().maximum(exact_alone) * 1e-6)
        torch.testing.assert_close(got, reference.activation_and_mul(plain, kind), rtol=1e-2, atol=1e-3)


def test_gelu_of_every_bfloat16(cpu: Any) -> None:
    """What is nearest to the true value, wherever that is no denormal; without fma, one has its neighbour."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = EXACT["gelu"](x.double())
    x, exact = (some[x.isfinite() & ((exact == 0) | (exact.abs() > 1.2e-38))] for some in (x, exact))
    wrong = cpu.activation(x[None], "gelu")[0] != exact.bfloat16()
    assert int(wrong.sum()) <= (cpu.isa() == "portable")
    rest = x[: 64 * 100 + 49]  # whole registers in the last row, and a part of one
    assert same_bits(cpu.activation(rest[None], "gelu"), cpu.activation(rest[:, None], "gelu").T)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_nan_is_kept(kernels: Any, dtype: torch.dtype, kind: str) -> None:
    for channels in (20, 24):
        x = torch.full((1, channels), torch.nan, dtype=dtype)
        x[0, ::2] = 1.0
        assert torch.equal(kernels.activation(x, kind).isnan(), x.isnan())


def exact_swiglu(x: torch.Tensor, alpha: float, limit: float, interleaved: bool) -> torch.Tensor:
    gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [1, 7, 8, 17, 1000])
def test_clamped_swiglu(kernels: Any, dtype: torch.dtype, channels: int, interleaved: bool) -> None:
    for tokens in TOKENS:
        plain = randn(tokens, 2 * channels, dtype=dtype) * 6  # some beyond the limit, on both sides
        exact = exact_swiglu(plain, 1.702, 7.0, interleaved)
        error = exact.abs() * 4e-6 + 1e-6
        for layout in LAYOUTS:
            x = layout(plain)
            got = kernels.clamped_swiglu(x, 1.702, 7.0, interleaved)
            assert_close(got, exact, error)
            for t in range(0, tokens, 4):
                assert same_bits(kernels.clamped_swiglu(x[t : t + 1], 1.702, 7.0, interleaved), got[t : t + 1])
        twin = reference.clamped_swiglu(plain, 1.702, 7.0, interleaved)
        torch.testing.assert_close(got, twin, rtol=1e-2, atol=1e-3)
    x = torch.full((1, 2 * channels), torch.nan, dtype=dtype)
    assert kernels.clamped_swiglu(x, 1.702, 7.0, interleaved).isnan().all()


@pytest.mark.parametrize("channels", [1, 16, 1001])
def test_xielu(kernels: Any, dtype: torch.dtype, channels: int) -> None:
    alphas = [torch.tensor([value], dtype=dtype) for value in (0.21, -1.05)]
    beta, eps = torch.tensor([0.5]), torch.tensor([-1e-6])
    positive, negative = (torch.nn.functional.softplus(alpha.double()) for alpha in alphas)
    for tokens in TOKENS:
        plain = randn(tokens, channels, dtype=dtype) * 5
        wide = plain.double()
        below = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * (0.5 + negative)
        exact = torch.where(wide > 0, positive * wide * wide, below) + 0.5 * wide
        # Both terms are as large as x, and for a small x below 0 nothing of their difference is left.
        error = (wide.abs() + exact.abs()) * 1e-6
        for layout in LAYOUTS:
            x = layout(plain)
            got = kernels.xielu(x, *alphas, beta, eps)
            assert_close(got, exact, error)
            for t in range(0, tokens, 4):
                assert same_bits(kernels.xielu(x[t : t + 1], *alphas, beta, eps), got[t : t + 1])
        torch.testing.assert_close(got, reference.xielu(plain, *alphas, beta, eps), rtol=1e-2, atol=1e-5)
    assert kernels.xielu(torch.full((1, channels), torch.nan, dtype=dtype), *alphas, beta, eps).isnan().all()


@pytest.mark.parametrize("channels", [1, 16, 1001])
def test_add_and_scale(kernels: Any, dtype: torch.dtype, channels: int) -> None:
    for tokens in TOKENS:
        plain, more = randn(tokens, channels, dtype=dtype), randn(tokens, channels, dtype=dtype, seed=1) * 40
        wide = plain.double()
        for layout in LAYOUTS:
            x, added = layout(plain), layout(more)
            got = kernels.add(x, added, 0.22)
            assert_close(got, wide + more.double() * 0.22, (wide.abs() + more.double().abs()) * 1e-7)
            assert same_bits(got, reference.add(plain, more, 0.22))
            assert same_bits(kernels.add(x, added), plain + more)
            total = plain.clone()
            assert kernels.add_to(total, added, 0.22) is None and same_bits(total, got)
            assert_close(kernels.scale(added, 0.3), more.double() * 0.3, more.double().abs() * 1e-7)
            assert same_bits(kernels.scale(added, 0.3), reference.scale(more, 0.3))
            capped = kernels.scale(added, 0.5, 30.0)
            exact = torch.tanh(more.double() * 0.5 / 30) * 30
            assert_close(capped, exact, exact.abs() * 4e-6)
            for t in range(0, tokens, 4):
                assert same_bits(kernels.scale(added[t : t + 1], 0.5, 30.0), capped[t : t + 1])
        torch.testing.assert_close(capped, reference.scale(more, 0.5, 30.0), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 16, 1001])
def test_rows_by_numbers_of_their_own_and_limits(kernels: Any, dtype: torch.dtype, channels: int) -> None:
    for tokens in TOKENS:
        plain, factors = randn(tokens, channels, dtype=dtype), randn(tokens, dtype=torch.float32, seed=1)
        plain[tokens // 2 :, channels // 2 :] = torch.nan
        equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
        wanted = (plain.float() * factors.unsqueeze(1)).to(dtype)
        for layout in LAYOUTS:
            x = layout(plain)
            for own in (kernels, reference):
                equal(own.multiply_rows(x, factors), wanted)
                equal(own.clip(x, 0.3), plain.clamp(-0.3, 0.3))


def check_company(kernels: Any, x: torch.Tensor, spans: list[tuple[int, int]]) -> None:
    """Every row of [T, 336] is the one that it is in other company."""
    weight, bias = randn(336, dtype=x.dtype, seed=1), randn(336, dtype=x.dtype, seed=2)
    one = torch.ones(1)
    positions, cos_sin = torch.arange(len(x)), randn(1, 42, dtype=torch.float32, seed=3).repeat(len(x), 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), 8, 42).clone()
        kernels.rotary(heads, heads[:, :0], positions[: len(x)], cos_sin)
        return heads

    def turned_in_pairs(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(x), 8, 42).clone()
        kernels.rotary(heads, None, positions[: len(x)], cos_sin[:, :34].contiguous(), True, 5)
        return heads

    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: kernels.rms_norm(x, weight, 1e-6),
        lambda x: kernels.rms_norm(x, weight, 1e-6, x.clone()),
        lambda x: kernels.rms_norm(x[:, :333], weight[:333], 1e-6),
        lambda x: kernels.rms_norm(x, weight, 1e-6, x.clone(), 1.0, 0.3),
        lambda x: kernels.rms_norm_heads(x.view(-1, 8, 42)[:, 1:], weight.view(8, 42)[1:], 1e-6, 1.0),
        lambda x: kernels.rms_norm_heads(x.view(-1, 8, 42)[:, 1:6], weight[None, :42], 1e-6),
        lambda x: kernels.layer_norm_heads(x.view(-1, 3, 112), weight[None, :112], bias[None, :112], 1e-6),
        lambda x: kernels.layer_norm(x, weight, bias, 1e-6),
        lambda x: kernels.layer_norm(x[:, :333], weight[:333], bias[:333], 1e-6),
        lambda x: kernels.activation(x[:, :333], "gelu"),
        lambda x: kernels.activation(x, "gelu"),
        lambda x: kernels.activation_and_mul(x[:, :332], "silu"),
        lambda x: kernels.activation_and_mul(x, "silu"),
        rotated,
        turned_in_pairs,
        lambda x: kernels.clamped_swiglu(x[:, :334], 1.702, 7.0, True),
        lambda x: kernels.xielu(x[:, :333], weight[:1], bias[:1], one, -one * 1e-6),
        lambda x: kernels.add(x[:, :333], x[:, 3:], 0.3),
        lambda x: kernels.scale(x[:, :333], 3.0, 2.0),
        lambda x: kernels.multiply_rows(x[:, :333], 1.3 * one.expand(len(x)).contiguous()),
        *(lambda x, kind=kind: kernels.activation(x[:, :333], kind) for kind in ("mish", "tanh", "relu2")),
    ]
    for call in calls:
        together = call(x)
        for first, last in spans:
            assert same_bits(call(x[first:last]), together[first:last])


def test_a_row_does_not_depend_on_its_company(kernels: Any, dtype: torch.dtype) -> None:
    check_company(kernels, randn(300, 336, dtype=dtype), [(0, 1), (7, 9), (150, 299), (299, 300)])


def test_a_row_does_not_depend_on_the_order_of_warps(cuda: Any, order: int, dtype: torch.dtype) -> None:
    check_company(cuda, randn(40, 336, dtype=dtype), [(0, 1), (7, 9), (20, 39), (39, 40)])


@pytest.mark.parametrize("with_added", [False, True])
def test_an_id_outside_the_table_reads_as_zeros(cuda: Any, dtype: torch.dtype, with_added: bool) -> None:
    """A GPU cannot raise: ids below 0 pad a batch. The CPU's refusal is in test_arguments.py."""
    table = randn(7, 40, dtype=dtype)
    ids = torch.tensor([3, -1, 7, 6, 2**62, -(2**62), 0])
    added = randn(7, 40, dtype=dtype, seed=1) if with_added else None
    rows = torch.where((ids >= 0).logical_and(ids < 7)[:, None], table[ids.clamp(0, 6)], torch.zeros((), dtype=dtype))
    assert same_bits(cuda.embedding(ids, table, added), rows if added is None else rows + added)
