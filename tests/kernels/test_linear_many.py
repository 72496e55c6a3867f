"""`linear` for many tokens and wide weights: another kernel, and the bits of a call of one token all the same."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import assert_close, misaligned, randn, same_bits, strided_rows
from test_linear import exact_linear
from test_lora import Product

native = pytest.importorskip("quire.kernels.native")
pytestmark = pytest.mark.usefixtures("one_thread")  # more threads need wider weights before it is used


def one_by_one(x: torch.Tensor, call) -> torch.Tensor:
    return torch.cat([call(x[i : i + 1]) for i in range(len(x))])


@pytest.mark.parametrize(
    ("features", "rows"),
    [
        (1, (130,)), (15, (260, 3)), (31, (129,)), (64, (128,)), (65, (300, 131)), (100, (64, 70, 1)), (500, (161,)),
        (3000, (150,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("out", [None, torch.float32], ids=["same", "float32"])
def test_the_bits_of_one_token_alone(isa: str, dtype: torch.dtype, features: int, rows: tuple[int, ...], out) -> None:
    weights = [misaligned(randn(n, features, dtype=dtype, seed=n)) for n in rows]
    biases = [None if i % 2 else misaligned(randn(n, dtype=dtype, seed=n + 1)) for i, n in enumerate(rows)]
    x = strided_rows(randn(200, features, dtype=dtype, seed=features))

    def call(part: torch.Tensor) -> torch.Tensor:
        return native.linear(part, weights, biases, out)

    alone = one_by_one(x, call)
    assert_close(alone, *exact_linear(x, weights, biases))
    for tokens in (7, 12, 13, 14, 24, 25, 26, 36, 47, 49, 73, 97, 200):
        assert same_bits(call(x[:tokens]), alone[:tokens]), tokens


def test_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    x, weight = randn(90, 70, dtype=dtype), randn(1000, 70, dtype=dtype, seed=1)
    wanted = native.linear(x, [weight], [None])
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert same_bits(native.linear(x, [weight], [None]), wanted)
    finally:
        torch.set_num_threads(before)  # the module's fixture comes back to it after the last test only


def test_what_is_not_a_number_stays_in_its_row_and_column(isa: str, dtype: torch.dtype) -> None:
    x, weight = randn(80, 90, dtype=dtype), randn(140, 90, dtype=dtype, seed=1)
    clean = native.linear(x, [weight], [None])
    x[33, 89], weight[7, 0] = torch.nan, torch.inf
    got = native.linear(x, [weight], [None])
    rows, columns = [i for i in range(80) if i != 33], [i for i in range(140) if i != 7]
    assert got[33].isnan().all() and not got[rows][:, 7].isfinite().any()
    assert same_bits(got[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("features", [90, 3000])
def test_adapters_across_parts_of_the_tokens(isa: str, dtype: torch.dtype, features: int) -> None:
    product = Product(features, [160, 33], [5, 40], dtype)
    x = randn(150, features, dtype=dtype)
    rows = [(0, 40, 0, 1.0), (45, 130, 1, 0.5), (45, 130, 0, 0.25), (130, 131, 1, 1.0)]
    together = product(x, rows)
    for i in range(0, 150, 7):
        own = [(0, 1, slot, weight) for start, end, slot, weight in rows if start <= i < end]
        assert same_bits(product(x[i : i + 1], own), together[i : i + 1]), i
    base = product(x, None)
    assert same_bits(together[40:45], base[40:45]) and same_bits(together[131:], base[131:])
