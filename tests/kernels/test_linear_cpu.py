"""The CPU's `linear` for many tokens and wide weights: another kernel, and the bits of one token all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import assert_close, misaligned, randn, same_bits, strided_rows
from linear_cases import Product, exact_linear, operands

from quire.kernels.experts import ExpertWeights

pytestmark = pytest.mark.usefixtures("one_thread")  # more threads need wider weights before it is used


@pytest.mark.parametrize(
    ("features", "rows"),
    [
        (1, (130,)), (15, (260, 3)), (31, (129,)), (64, (128,)), (65, (300, 131)), (100, (64, 70, 1)), (500, (161,)),
        (3000, (150,)), (6151, (150, 7)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("out", [None, torch.float32], ids=["same", "float32"])
def test_the_bits_of_one_token_alone(
    cpu: Any, dtype: torch.dtype, features: int, rows: tuple[int, ...], out: torch.dtype | None
) -> None:
    weights, biases = operands(features, rows, dtype)
    weights = [misaligned(weight) for weight in weights]
    biases = [None if bias is None else misaligned(bias) for bias in biases]
    x = strided_rows(randn(250, features, dtype=dtype, seed=features))
    alone = torch.cat([cpu.linear(x[i : i + 1], weights, biases, out) for i in range(len(x))])
    assert_close(alone, *exact_linear(x, weights, biases))
    for tokens in (7, 12, 13, 14, 24, 25, 26, 36, 47, 49, 73, 97, 121, 200, 241, 250):
        assert same_bits(cpu.linear(x[:tokens], weights, biases, out), alone[:tokens]), tokens


@pytest.mark.parametrize("size", [1e-18, 1e-19, 1e-20])
def test_the_bits_of_one_token_alone_among_denormals(cpu: Any, size: float) -> None:
    """Products of floats are another way to the sums of vdpbf16ps, which takes denormals for zeros."""
    x, weight = (randn(n, 100, dtype=torch.float32, seed=n) * size for n in (40, 130))
    x, weight = x.bfloat16(), weight.bfloat16()
    alone = torch.cat([cpu.linear(x[i : i + 1], [weight], [None]) for i in range(len(x))])
    for tokens in (2, 3, 12, 13, 40):
        assert same_bits(cpu.linear(x[:tokens], [weight], [None]), alone[:tokens]), tokens
        rows = torch.arange(tokens)
        starts = torch.tensor([0, tokens, tokens], dtype=torch.int32)
        experts = ExpertWeights([[weight], [weight]])
        assert same_bits(cpu.grouped_linear(x[:tokens], starts, rows, experts), alone[:tokens]), tokens


@pytest.mark.parametrize("features", [3104, 7000])
def test_long_features_beside_experts_and_adapters(cpu: Any, dtype: torch.dtype, features: int) -> None:
    """The sums of several panels: in an expert's call too, and with what an adapter adds."""
    x, weight = randn(80, features, dtype=dtype), randn(170, features, dtype=dtype, seed=1)
    alone = torch.cat([cpu.linear(x[i : i + 1], [weight], [None]) for i in range(len(x))])
    assert_close(alone, *exact_linear(x, [weight], [None]))
    experts = ExpertWeights([[weight], [weight]])
    for tokens in (49, 61, 80):
        starts = torch.tensor([0, tokens, tokens], dtype=torch.int32)
        got = cpu.grouped_linear(x[:tokens], starts, torch.arange(tokens), experts)
        assert same_bits(got, alone[:tokens]), tokens
    product = Product(cpu, features, [170, 130], {0: 5, 1: 16}, dtype)
    together = product.check(x, [(3, 20, 0, 1.0), (20, 77, 1, 0.5)])
    assert same_bits(product(x[10:70], [(0, 10, 0, 1.0), (10, 60, 1, 0.5)]), together[10:70])
    assert same_bits(product(x[30:31], [(0, 1, 1, 0.5)]), together[30:31])


@pytest.mark.parametrize("features", [96, 1000])
def test_many_tokens_beside_adapters(cpu: Any, dtype: torch.dtype, features: int) -> None:
    """As many as are multiplied with turned rows on AVX-512, and a last tile that is not full."""
    x = randn(251, features, dtype=dtype)
    product = Product(cpu, features, [170, 130], {0: 5, 1: 16}, dtype)
    together = product.check(x, [(3, 40, 0, 1.0), (40, 247, 1, 0.5)])
    assert same_bits(product(x[5:247], [(0, 35, 0, 1.0), (35, 242, 1, 0.5)]), together[5:247])
    for row, slot, scale in ((20, 0, 1.0), (246, 1, 0.5)):
        assert same_bits(product(x[row : row + 1], [(0, 1, slot, scale)]), together[row : row + 1])


@pytest.mark.parametrize("features", [70, 8300])
def test_more_tokens_than_a_cache_holds(cpu: Any, dtype: torch.dtype, features: int) -> None:
    """Many tokens in parts, and the long features of few ones in panels."""
    weights, biases = operands(features, (150, 33), dtype)
    x, some = randn(600, features, dtype=dtype), (0, 40, 63, 271, 303, 304, 599)
    alone = {i: cpu.linear(x[i : i + 1], weights, biases) for i in some}
    for tokens in (41, 64, 530, 600):
        got = cpu.linear(x[:tokens], weights, biases)
        for i in some:
            if i < tokens:
                assert same_bits(got[i : i + 1], alone[i]), (tokens, i)


def test_any_number_of_threads(cpu: Any, dtype: torch.dtype) -> None:
    x, weight = randn(90, 70, dtype=dtype), randn(1000, 70, dtype=dtype, seed=1)
    wanted = cpu.linear(x, [weight], [None])
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert same_bits(cpu.linear(x, [weight], [None]), wanted)
    finally:
        torch.set_num_threads(before)  # the module's fixture comes back to it after the last test only
