"""The kernels that go row by row (norms, activations) against float64 and against their torch twins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_helpers import assert_close, misaligned, randn, same_bits, strided_rows

from quire.kernels import ACTIVATION_KINDS, reference

native = pytest.importorskip("quire.kernels.native")

CHANNELS = [1, 2, 15, 16, 49, 64, 65, 1000]
TOKENS = [0, 1, 9]


def exact_norm(x: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
    wide = x.double()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_added", [False, True])
def test_embedding(isa: str, dtype: torch.dtype, channels: int, with_added: bool) -> None:
    table = misaligned(randn(50, channels, dtype=dtype))
    for tokens in (*TOKENS, 700):
        ids = torch.arange(tokens).mul(7).remainder(50)
        added = randn(tokens, channels, dtype=dtype, seed=1) if with_added else None
        got = native.embedding(ids, table, added)
        assert same_bits(got, table[ids] if added is None else table[ids] + added)
        assert same_bits(got, reference.embedding(ids, table, added))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(isa: str, dtype: torch.dtype, channels: int, with_residual: bool) -> None:
    weight = misaligned(randn(channels, dtype=dtype, seed=1))
    for tokens in TOKENS:
        x = strided_rows(randn(tokens, channels, dtype=dtype, seed=2))
        residual = randn(tokens, channels, dtype=dtype, seed=3) if with_residual else None
        total = x if residual is None else residual + x
        got = native.rms_norm(x, weight, 1e-5, residual)
        exact = exact_norm(total, 1e-5, False) * weight.double()
        assert_close(got, exact, exact.abs() * 1e-6)
        assert residual is None or same_bits(residual, total)
        # The twin's own error is of the same order.
        assert_close(reference.rms_norm(total, weight, 1e-5), exact, exact.abs() * 1e-6)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("with_weight", "with_bias"), [(True, True), (False, False)])
def test_layer_norm(
    isa: str, dtype: torch.dtype, channels: int, with_residual: bool, with_weight: bool, with_bias: bool
) -> None:
    weight = randn(channels, dtype=dtype, seed=1) if with_weight else None
    bias = randn(channels, dtype=dtype, seed=4) if with_bias else None
    for tokens in TOKENS:
        x = strided_rows(randn(tokens, channels, dtype=dtype, seed=2) + 3)
        residual = randn(tokens, channels, dtype=dtype, seed=3) if with_residual else None
        total = x if residual is None else residual + x
        got = native.layer_norm(x, weight, bias, 1e-5, residual)
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
        torch.testing.assert_close(got, reference.layer_norm(total, weight, bias, 1e-5), rtol=2e-2, atol=2e-2)


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activation_over_the_whole_range(isa: str, dtype: torch.dtype, kind: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-30])
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-3, 3, 4001), special]).to(dtype)[None]
    exact = EXACT[kind](x.double())
    got = native.activation(x, kind)
    # Below -5 the functions fall off faster than their float32 argument is exact.
    assert_close(got, exact, exact.abs() * 2e-5 + x.double().abs() * 1e-12 + 1e-38)
    near = x.abs() < 5
    assert_close(got[near], exact[near], exact[near].abs() * 4e-6)
    torch.testing.assert_close(got, reference.activation(x, kind), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("channels", [1, 15, 16, 17, 100, 1000])
def test_activation_and_mul(isa: str, dtype: torch.dtype, kind: str, channels: int) -> None:
    for tokens in TOKENS:
        x = strided_rows(randn(tokens, 2 * channels, dtype=dtype))
        exact = EXACT[kind](x[:, :channels].double()) * x[:, channels:].double()
        assert_close(native.activation_and_mul(x, kind), exact, exact.abs() * 4e-6)
        assert_close(native.activation(x, kind), EXACT[kind](x.double()), x.double().abs() * 1e-6)
        expected = reference.activation_and_mul(x, kind)
        torch.testing.assert_close(native.activation_and_mul(x, kind), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_nan_is_kept(isa: str, dtype: torch.dtype, kind: str) -> None:
    x = torch.full((1, 20), torch.nan, dtype=dtype)
    x[0, ::2] = 1.0
    assert torch.equal(native.activation(x, kind).isnan(), x.isnan())


def test_a_row_does_not_depend_on_its_company(isa: str, dtype: torch.dtype) -> None:
    x = randn(300, 333, dtype=dtype)
    weight, bias = randn(333, dtype=dtype, seed=1), randn(333, dtype=dtype, seed=2)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: native.rms_norm(x, weight, 1e-6),
        lambda x: native.rms_norm(x, weight, 1e-6, x.clone()),
        lambda x: native.layer_norm(x, weight, bias, 1e-6),
        lambda x: native.activation(x, "gelu"),
        lambda x: native.activation_and_mul(x[:, :332], "silu"),
    ]
    for call in calls:
        together = call(x)
        for first, last in ((0, 1), (7, 9), (150, 299), (299, 300)):
            assert same_bits(call(x[first:last]), together[first:last])
