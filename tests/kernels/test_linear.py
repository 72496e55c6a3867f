"""`linear` against float64, and its promise: an element's bits depend on one row of x and one row of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_helpers import assert_close, is_gpu, misaligned, randn, same_bits, strided_rows, wide_rows
from linear_cases import F32, Layout, exact_linear, operands

from quire.kernels import reference

pytestmark = pytest.mark.usefixtures("one_thread")  # the oracle's products are small; test_linear_cpu.py has threads
# Every one of the GPU's kernels, just below and above what it is chosen for.
TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130)


@pytest.mark.parametrize(
    ("features", "rows"),
    [
        (1, (1,)), (2, (2, 3)), (7, (5,)), (15, (9,)), (16, (64, 1, 9)), (17, (4,)), (31, (1, 1, 1)),
        (32, (33,)), (33, (8, 4)), (63, (130, 67)), (64, (3,)), (96, (70, 40)), (100, (65, 2)), (256, (6,)),
        (1000, (7, 13)),
    ],
)  # fmt: skip
def test_close_to_float64(quick: Any, dtype: torch.dtype, features: int, rows: tuple[int, ...]) -> None:
    weights, biases = operands(features, rows, dtype)
    weights = [misaligned(weight) for weight in weights]
    biases = [None if bias is None else misaligned(bias) for bias in biases]
    for tokens in (0, 1, 2, 3, 5, 6, 7, 13, 70, 150):
        x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
        exact, error = exact_linear(x, weights, biases)
        for out_dtype in {dtype, F32}:
            got = quick.linear(x, weights, biases, out_dtype)
            assert got.dtype is out_dtype and got.is_contiguous()
            assert_close(got, exact, error)


def test_close_to_reference(kernels: Any, dtype: torch.dtype) -> None:
    x = randn(33, 300, dtype=dtype)
    weights = [randn(47, 300, dtype=dtype, seed=1), randn(8, 300, dtype=dtype, seed=2)]
    biases = [randn(47, dtype=dtype, seed=3), None]
    expected = reference.linear(x, weights, biases, F32)
    got = kernels.linear(x, weights, biases, F32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def check_all(
    kernels: Any,
    features: int,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    lay: Layout = lambda x: x,
    tokens: Sequence[int] = TOKENS,
) -> None:
    """Close to float64, and each row the one that it is alone."""
    if dtype is F32 and is_gpu(kernels):  # which has one kernel for it
        tokens = [count for count in tokens if count < 40]
    weights, biases = operands(features, rows, dtype)
    x = randn(max(tokens), features, dtype=dtype, seed=features)
    wanted, error = exact_linear(x, weights, biases)
    weights = [lay(weight) for weight in weights]
    for out_dtype in {dtype, F32}:
        alone = torch.cat([kernels.linear(lay(row[None]), weights, biases, out_dtype) for row in x])
        assert alone.dtype is out_dtype
        assert_close(alone, wanted, error)
        for count in tokens:
            got = kernels.linear(lay(x[:count]), weights, biases, out_dtype)
            assert got.is_contiguous() and same_bits(got, alone[:count]), count


@pytest.mark.parametrize(
    ("features", "rows"),
    [(8, (1,)), (32, (16, 40)), (64, (33, 130)), (96, (400,)), (136, (48, 8, 24)), (520, (72,))],
)
def test_every_number_of_tokens(kernels: Any, dtype: torch.dtype, features: int, rows: tuple[int, ...]) -> None:
    check_all(kernels, features, rows, dtype)


def test_parts_of_many_features(kernels: Any) -> None:
    check_all(kernels, 2080, (20,), torch.bfloat16, tokens=(1, 8, 9, 17, 33, 66))
    check_all(kernels, 2048, (130, 24), torch.bfloat16, tokens=(17, 33, 66))


@pytest.mark.parametrize(("features", "rows"), [(1, (3,)), (7, (17, 1)), (33, (70,)), (100, (20, 50)), (150, (9,))])
def test_features_that_no_vector_fits(kernels: Any, dtype: torch.dtype, features: int, rows: tuple[int, ...]) -> None:
    check_all(kernels, features, rows, dtype, tokens=(1, 8, 9, 70))


def test_layouts(kernels: Any, dtype: torch.dtype) -> None:
    """Rows apart, rows that start anywhere, weights that do: the same bits, as it happens."""
    weights, biases = operands(72, (48, 30), dtype)
    for tokens in (1, 5, 12, 20, 40, 70):
        x = randn(tokens, 72, dtype=dtype)
        wanted = kernels.linear(x, weights, biases)
        for lay in (wide_rows, strided_rows, misaligned):
            assert same_bits(kernels.linear(lay(x), weights, biases), wanted)
        odd = [None if bias is None else misaligned(bias) for bias in biases]
        assert same_bits(kernels.linear(x, [weights[0], misaligned(weights[1])], odd), wanted)


@pytest.mark.parametrize("features", [32, 77, 520])
def test_a_row_does_not_depend_on_its_company(kernels: Any, dtype: torch.dtype, features: int) -> None:
    x = randn(70, features, dtype=dtype)
    weights = [randn(n, features, dtype=dtype, seed=n) for n in (45, 6, 65)]
    biases: list[torch.Tensor | None] = [randn(n, dtype=dtype, seed=n) for n in (45, 6, 65)]
    together = kernels.linear(x, weights, biases, F32)
    for first, last in [(i, i + 1) for i in range(0, 70, 3)] + [(3, 5), (1, 8), (0, 12), (9, 40)]:
        part = kernels.linear(x[first:last], weights, biases, F32)
        assert same_bits(part, together[first:last])


def test_a_column_does_not_depend_on_its_company(kernels: Any, dtype: torch.dtype) -> None:
    x, weight = randn(9, 200, dtype=dtype), randn(70, 200, dtype=dtype, seed=1)
    whole = kernels.linear(x, [weight], [None])
    single = [kernels.linear(x, [misaligned(weight[i : i + 1])], [None]) for i in range(70)]
    assert same_bits(torch.cat(single, 1), whole)
    pieces = [weight[:1], weight[1:33], weight[33:34], weight[34:]]
    assert same_bits(kernels.linear(x, pieces, [None] * 4), whole)


def test_widths_beside_each_other(kernels: Any, dtype: torch.dtype) -> None:
    """More weights than one launch takes, empty ones, and columns that no vector fits."""
    rows = (3, 16, 0, 17, 1, 33, 8, 64, 5, 130, 2)
    weights, biases = operands(40, rows, dtype)
    for tokens in (1, 20, 66):
        x = randn(tokens, 40, dtype=dtype, seed=tokens)
        got = kernels.linear(x, weights, biases)
        assert_close(got, *exact_linear(x, weights, biases))
        single = [kernels.linear(x, [weight], [bias]) for weight, bias in zip(weights, biases, strict=True)]
        assert same_bits(got, torch.cat(single, 1))


@pytest.mark.parametrize(
    ("tokens", "features", "rows"),
    [(8, 90, 10), (80, 90, 140), *((tokens, 72, 290) for tokens in (6, 15, 31, 60, 90))],
)
def test_what_is_not_a_number_stays_in_its_row_and_column(
    kernels: Any, dtype: torch.dtype, tokens: int, features: int, rows: int
) -> None:
    x, weight = randn(tokens, features, dtype=dtype), randn(rows, features, dtype=dtype, seed=1)
    clean = kernels.linear(x, [weight], [None])
    row = min(tokens - 1, 33) if tokens > 8 else 3
    x[row, features - 1], weight[7, 0] = torch.nan, torch.inf
    got = kernels.linear(x, [weight], [None])
    others, columns = [i for i in range(tokens) if i != row], [i for i in range(rows) if i != 7]
    assert got[row].isnan().all() and not got[others][:, 7].isfinite().any()
    assert same_bits(got[others][:, columns], clean[others][:, columns])


def test_no_features_gives_the_bias(kernels: Any, dtype: torch.dtype) -> None:
    bias = randn(5, dtype=dtype)
    got = kernels.linear(torch.empty(3, 0, dtype=dtype), [torch.empty(5, 0, dtype=dtype)], [bias])
    assert torch.equal(got, bias.expand(3, 5))
    many = kernels.linear(torch.empty(100, 0, dtype=dtype), [torch.empty(3000, 0, dtype=dtype)], [None])
    assert torch.equal(many, torch.zeros(100, 3000, dtype=dtype))


def test_nothing_to_do(kernels: Any, dtype: torch.dtype) -> None:
    weight = randn(5, 16, dtype=dtype)
    assert kernels.linear(randn(0, 16, dtype=dtype), [weight], [None]).shape == (0, 5)
    assert kernels.linear(randn(3, 16, dtype=dtype), [weight[:0]], [None]).shape == (3, 0)
    assert kernels.linear(randn(3, 16, dtype=dtype), [], []).shape == (3, 0)


@pytest.mark.parametrize("tokens", [3, 14, 30, 60, 70, 140])
def test_any_order_of_warps_and_copies(cuda: Any, order: int, tokens: int) -> None:
    """Wide and narrow enough for all kernels, and with more steps than fit shared memory."""
    for features, rows in ((650, 24), (648, 24), (648, 300)):
        weights, biases = operands(features, (rows,), torch.bfloat16)
        x = randn(tokens, features, dtype=torch.bfloat16)
        assert_close(cuda.linear(x, weights, biases, F32), *exact_linear(x, weights, biases))
