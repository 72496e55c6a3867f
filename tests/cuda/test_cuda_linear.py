"""The GPU's `linear` against float64, and its promise: an element's bits depend on one row of x and one of a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

# The most that rounding once may change a value, relative to it.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Every kernel, just below and above what it is chosen for.
TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130)
Tensors = list[torch.Tensor]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: torch.Tensor, more: int) -> torch.Tensor:
    """x with rows `more` elements longer than it is wide, NaN between them and around."""
    start = 16
    buffer = torch.full((start + x.shape[0] * (x.shape[1] + more) + 16,), torch.nan, dtype=x.dtype)
    assert buffer.data_ptr() % 16 == 0
    view = buffer[start:].as_strided(x.shape, (x.shape[1] + more, 1))
    return view.copy_(x)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """x one element past an aligned address."""
    buffer = torch.full((x.numel() + 2,), torch.nan, dtype=x.dtype)
    return buffer[1 : 1 + x.numel()].view(x.shape).copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int32 if a.dtype is torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def operands(features: int, rows: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensors, list[torch.Tensor | None]]:
    weights = [randn(n, features, dtype=dtype, seed=n) for n in rows]
    return weights, [randn(n, dtype=dtype, seed=n + 1) if i % 2 == 0 else None for i, n in enumerate(rows)]


def exact(x: torch.Tensor, weights: Tensors, biases: list[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 result, and a bound on what float32 sums may lose."""
    wide, parts, sizes = x.double(), [], []
    for weight, bias in zip(weights, biases, strict=True):
        add = torch.zeros(len(weight)) if bias is None else bias
        parts.append(wide @ weight.double().T + add.double())
        sizes.append(wide.abs() @ weight.double().abs().T + add.double().abs())
    return torch.cat(parts, 1), torch.cat(sizes, 1) * (x.shape[1] / 8 + 8) * ROUNDING[torch.float32]


def assert_close(got: torch.Tensor, wanted: torch.Tensor, error: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert not got.isnan().any(), f"{int(got.isnan().sum())} elements are NaN"
    limit = error + (error + wanted.abs()) * ROUNDING[got.dtype] * 1.01 + 6e-8
    excess = (got.double() - wanted).abs() - limit
    assert (excess <= 0).all(), f"worst excess {excess.max().item():.3g} over a limit of {limit.max().item():.3g}"


def check_all(
    cuda: ModuleType,
    features: int,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    lay: Callable,
    tokens: Sequence[int] = TOKENS,
) -> None:
    """Close to float64, and each row the one that it is alone."""
    if dtype is torch.float32:  # which has one kernel
        tokens = [count for count in tokens if count < 40]
    weights, biases = operands(features, rows, dtype)
    x = randn(max(tokens), features, dtype=dtype, seed=features)
    wanted, error = exact(x, weights, biases)
    weights = [lay(weight) for weight in weights]
    for out_dtype in {dtype, torch.float32}:
        alone = torch.cat([cuda.linear(lay(row[None]), weights, biases, out_dtype) for row in x])
        assert alone.dtype is out_dtype
        assert_close(alone, wanted, error)
        for count in tokens:
            got = cuda.linear(lay(x[:count]), weights, biases, out_dtype)
            assert got.is_contiguous() and same_bits(got, alone[:count]), count


@pytest.mark.parametrize(
    ("features", "rows"),
    [(8, (1,)), (32, (16, 40)), (64, (33, 130)), (96, (400,)), (136, (48, 8, 24)), (520, (72,))],
)
def test_every_number_of_tokens(cuda: ModuleType, dtype: torch.dtype, features: int, rows: tuple[int, ...]) -> None:
    check_all(cuda, features, rows, dtype, lambda x: x)


def test_parts_of_many_features(cuda: ModuleType) -> None:
    check_all(cuda, 2080, (20,), torch.bfloat16, lambda x: x, (1, 8, 9, 17, 33, 66))
    check_all(cuda, 2048, (130, 24), torch.bfloat16, lambda x: x, (17, 33, 66))


@pytest.mark.parametrize(("features", "rows"), [(1, (3,)), (7, (17, 1)), (33, (70,)), (100, (20, 50)), (150, (9,))])
def test_features_that_no_vector_fits(
    cuda: ModuleType, dtype: torch.dtype, features: int, rows: tuple[int, ...]
) -> None:
    check_all(cuda, features, rows, dtype, lambda x: x, (1, 8, 9, 70))


def test_layouts(cuda: ModuleType, dtype: torch.dtype) -> None:
    """Rows apart, rows that start anywhere, weights that do: the same bits, as it happens."""
    weights, biases = operands(72, (48, 30), dtype)
    for tokens in (1, 5, 12, 20, 40, 70):
        x = randn(tokens, 72, dtype=dtype)
        wanted = cuda.linear(x, weights, biases)
        assert same_bits(cuda.linear(strided(x, 16), weights, biases), wanted)
        assert same_bits(cuda.linear(strided(x, 5), weights, biases), wanted)
        assert same_bits(cuda.linear(misaligned(x), weights, biases), wanted)
        odd = [None if bias is None else misaligned(bias) for bias in biases]
        assert same_bits(cuda.linear(x, [weights[0], misaligned(weights[1])], odd), wanted)


def test_widths_beside_each_other(cuda: ModuleType, dtype: torch.dtype) -> None:
    """More weights than one launch takes, empty ones, and columns that no vector fits."""
    rows = (3, 16, 0, 17, 1, 33, 8, 64, 5, 130, 2)
    weights, biases = operands(40, rows, dtype)
    for tokens in (1, 20, 66):
        x = randn(tokens, 40, dtype=dtype, seed=tokens)
        got = cuda.linear(x, weights, biases)
        assert_close(got, *exact(x, weights, biases))
        single = [cuda.linear(x, [weight], [bias]) for weight, bias in zip(weights, biases, strict=True)]
        assert same_bits(got, torch.cat(single, 1))


def test_nothing_to_do(cuda: ModuleType, dtype: torch.dtype) -> None:
    weight = randn(5, 16, dtype=dtype)
    assert cuda.linear(randn(0, 16, dtype=dtype), [weight], [None]).shape == (0, 5)
    assert cuda.linear(randn(3, 16, dtype=dtype), [weight[:0]], [None]).shape == (3, 0)
    assert cuda.linear(randn(3, 16, dtype=dtype), [], []).shape == (3, 0)


@pytest.mark.parametrize("tokens", [3, 14, 30, 60, 70, 140])
def test_any_order_of_warps_and_copies(cuda: ModuleType, order: int, tokens: int) -> None:
    """Wide and narrow enough for all kernels, and with more steps than fit shared memory."""
    for features, rows in ((650, 24), (648, 24), (648, 300)):
        weights, biases = operands(features, (rows,), torch.bfloat16)
        x = randn(tokens, features, dtype=torch.bfloat16)
        assert_close(cuda.linear(x, weights, biases, torch.float32), *exact(x, weights, biases))


def test_what_is_not_a_number_stays_in_its_row_and_column(cuda: ModuleType, dtype: torch.dtype) -> None:
    for tokens in (6, 15, 31, 60, 90):
        x, weight = randn(tokens, 72, dtype=dtype), randn(290, 72, dtype=dtype, seed=1)
        clean = cuda.linear(x, [weight], [None])
        x[5, 71], weight[7, 0] = torch.nan, torch.inf
        got = cuda.linear(x, [weight], [None])
        rows, columns = [i for i in range(tokens) if i != 5], [i for i in range(290) if i != 7]
        assert got[5].isnan().all() and not got[rows][:, 7].isfinite().any()
        assert same_bits(got[rows][:, columns], clean[rows][:, columns])
