"""Rows of codes, multiplied as they are unpacked: a few columns at a time for few tokens, rows as a whole for many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_helpers import randn, same_bits, strided_rows
from quantized_cases import random_weight

from quire.kernels import QuantizedWeight, RowKind, RowLayout
from tests.kernels.back_ends import CPU, back_end

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL_FLOATS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FEATURES = (1090, 1536)  # more than are unpacked at a time


@pytest.fixture(params=CPU)
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    with back_end(request.param) as module:
        yield module


def weights(features: int) -> list[QuantizedWeight]:
    made = []
    for kind in (RowKind.AFFINE4, RowKind.AFFINE8):
        for group, zeros in ((0, False), (32, True), (48, False), (100, True), (7, True)):
            weight = random_weight(RowLayout(kind, features, min(group, features), zeros), 6)
            made.append(weight)
            if group == 48:  # and columns that are not in the order of their groups
                groups = torch.arange(features, dtype=torch.int32).flip(0) % weight.layout.groups
                made.append(QuantizedWeight(weight.data, weight.layout, groups.contiguous()))
    for group in (0, 32, 100, 7):
        made.append(random_weight(RowLayout(RowKind.TABLE4, features, min(group, features)), 6))
        small = random_weight(RowLayout(RowKind.TABLE8, features, min(group, features)), 6)
        codes = small.data[:, 4 * small.layout.groups :]
        codes[:5][codes[:5] & 127 == 127] = 126  # NaN in the last row alone
        codes[5] = torch.arange(codes.shape[1]).to(torch.uint8)
        made += [small, QuantizedWeight(small.data, small.layout, SMALL_FLOATS)]
    return made


def without_nan(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.masked_fill(numbers.isnan(), 3.0)


@pytest.mark.parametrize("features", FEATURES)
def test_products_are_those_of_the_numbers(kernels: Any, dtype: torch.dtype, features: int) -> None:
    for weight in weights(features):
        numbers = weight.dequantize().to(dtype)
        bias = randn(len(weight), dtype=dtype)
        for tokens in (1, 2, 3, 6, 7, 40):
            x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
            for out_dtype in (None, torch.float32):
                got = kernels.quantized_linear(x, [weight], [bias], out_dtype)
                wanted = kernels.linear(x, [numbers], [bias], out_dtype)
                assert same_bits(without_nan(got), without_nan(wanted)), (weight.layout, tokens)
                assert got.isnan().sum() == wanted.isnan().sum()


def test_eight_bit_floats_are_all_there(kernels: Any) -> None:
    data = torch.cat([torch.tensor([1.5]).view(torch.uint8), torch.arange(256).to(torch.uint8)]).unsqueeze(0)
    weight = QuantizedWeight(data, RowLayout(RowKind.TABLE8, 256), SMALL_FLOATS)
    got = kernels.quantized_embedding(torch.tensor([0]), weight, torch.float32)
    wanted = SMALL_FLOATS * 1.5
    assert got.isnan().nonzero()[:, 1].tolist() == [127, 255]
    assert same_bits(without_nan(got[0]), without_nan(wanted))
