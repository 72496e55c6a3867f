"""`linear` against float64, and its promise: an element depends on one row of x and one row of a weight."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import ROUNDING, assert_close, misaligned, randn, same_bits, strided_rows

from quire.kernels import reference

native = pytest.importorskip("quire.kernels.native")


def exact_linear(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 result, and a bound on what float32 sums may lose."""
    wide, parts, sizes = x.double(), [], []
    for weight, bias in zip(weights, biases, strict=True):
        add = 0.0 if bias is None else bias.double()
        parts.append(wide @ weight.double().T + add)
        sizes.append(wide.abs() @ weight.double().abs().T + (0.0 if bias is None else add.abs()))
    return torch.cat(parts, 1), torch.cat(sizes, 1) * (x.shape[1] / 8 + 8) * ROUNDING[torch.float32]


@pytest.mark.parametrize(
    ("features", "rows"),
    [
        (1, (1,)), (2, (2, 3)), (7, (5,)), (15, (9,)), (16, (64, 1, 9)), (17, (4,)), (31, (1, 1, 1)),
        (32, (33,)), (33, (8, 4)), (63, (130, 67)), (64, (3,)), (96, (70, 40)), (100, (65, 2)), (256, (6,)),
        (1000, (7, 13)),
    ],
)  # fmt: skip
def test_close_to_float64(isa: str, dtype: torch.dtype, features: int, rows: tuple[int, ...]) -> None:
    weights = [misaligned(randn(n, features, dtype=dtype, seed=n)) for n in rows]
    biases = [None if i % 2 else misaligned(randn(n, dtype=dtype, seed=n + 1)) for i, n in enumerate(rows)]
    for tokens in (0, 1, 2, 3, 5, 6, 7, 13, 70, 150):
        x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
        exact, error = exact_linear(x, weights, biases)
        for out_dtype in {dtype, torch.float32}:
            got = native.linear(x, weights, biases, out_dtype)
            assert got.dtype is out_dtype and got.is_contiguous()
            assert_close(got, exact, error)


def test_close_to_reference(isa: str, dtype: torch.dtype) -> None:
    x = randn(33, 300, dtype=dtype)
    weights = [randn(47, 300, dtype=dtype, seed=1), randn(8, 300, dtype=dtype, seed=2)]
    biases = [randn(47, dtype=dtype, seed=3), None]
    expected = reference.linear(x, weights, biases, torch.float32)
    got = native.linear(x, weights, biases, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("features", [32, 77, 520])
def test_a_row_does_not_depend_on_its_company(isa: str, dtype: torch.dtype, features: int) -> None:
    x = randn(70, features, dtype=dtype)
    weights = [randn(n, features, dtype=dtype, seed=n) for n in (45, 6, 65)]
    biases = [randn(n, dtype=dtype, seed=n) for n in (45, 6, 65)]
    together = native.linear(x, weights, biases, torch.float32)
    for first, last in [(i, i + 1) for i in range(0, 70, 3)] + [(3, 5), (1, 8), (0, 12), (9, 40)]:
        part = native.linear(x[first:last], weights, biases, torch.float32)
        assert same_bits(part, together[first:last])


def test_a_column_does_not_depend_on_its_company(isa: str, dtype: torch.dtype) -> None:
    x, weight = randn(9, 200, dtype=dtype), randn(70, 200, dtype=dtype, seed=1)
    whole = native.linear(x, [weight], [None])
    single = [native.linear(x, [misaligned(weight[i : i + 1])], [None]) for i in range(70)]
    assert same_bits(torch.cat(single, 1), whole)
    pieces = [weight[:1], weight[1:33], weight[33:34], weight[34:]]
    assert same_bits(native.linear(x, pieces, [None] * 4), whole)


def test_special_values_stay_in_their_row_and_column(isa: str, dtype: torch.dtype) -> None:
    x, weight = randn(8, 90, dtype=dtype), randn(10, 90, dtype=dtype, seed=1)
    clean = native.linear(x, [weight], [None])
    x[3, 89], weight[7, 0] = torch.nan, torch.inf
    got = native.linear(x, [weight], [None])
    assert got[3].isnan().all()
    assert not got[:3, 7].isfinite().any() and not got[4:, 7].isfinite().any()
    keep = [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert same_bits(got[:3][:, keep], clean[:3][:, keep])


def test_no_features_gives_the_bias(isa: str, dtype: torch.dtype) -> None:
    bias = randn(5, dtype=dtype)
    got = native.linear(torch.empty(3, 0, dtype=dtype), [torch.empty(5, 0, dtype=dtype)], [bias])
    assert torch.equal(got, bias.expand(3, 5))
    many = native.linear(torch.empty(100, 0, dtype=dtype), [torch.empty(3000, 0, dtype=dtype)], [None])
    assert torch.equal(many, torch.zeros(100, 3000, dtype=dtype))
    assert native.linear(randn(3, 4, dtype=dtype), [], []).shape == (3, 0)
    assert native.linear(randn(3, 4, dtype=dtype), [torch.empty(0, 4, dtype=dtype)], [None]).shape == (3, 0)
