"""Sums of each sequence's rows: one row after the other, whatever a sequence is cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.back_ends import OWN, back_end

STARTS = [0, 3, 3, 20, 21, 90]


def summed(kernels: object, x: torch.Tensor, starts: list[int], sums: torch.Tensor | None = None) -> torch.Tensor:
    if sums is None:
        sums = torch.zeros(len(starts) - 1, x.shape[1], dtype=torch.float64)
    kernels.sum_rows(x, torch.tensor(starts, dtype=torch.int32), sums)  # type: ignore[attr-defined]
    return sums


@pytest.mark.parametrize("name", ["reference", *OWN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 5, 255, 256, 300, 768])
def test_rows_are_added_in_their_order(name: str, dtype: torch.dtype, channels: int) -> None:
    wide = torch.randn(90, channels + 7, generator=torch.Generator().manual_seed(channels)).to(dtype)
    x = wide[:, :channels]  # rows that lie apart
    expected = np.zeros((len(STARTS) - 1, channels))
    for own, first, end in zip(expected, STARTS, STARTS[1:], strict=False):
        for row in x[first:end].double().numpy():
            own += row
    with back_end(name) as kernels:
        found = summed(kernels, x, STARTS)
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("name", ["reference", *OWN])
def test_no_cut_changes_a_bit(name: str) -> None:
    x = torch.randn(64, 40) * 10.0 ** torch.randint(-3, 4, (64, 40))
    with back_end(name) as kernels:
        whole = summed(kernels, x, [0, 64])
        parts = summed(kernels, x[:13], [0, 13])
        parts = summed(kernels, x[13:14], [0, 1], parts)
        parts = summed(kernels, x[14:], [0, 50], parts)
        beside = summed(kernels, torch.cat([x[:9], x, x[:3]]), [0, 9, 73, 76])
    assert torch.equal(whole, parts) and torch.equal(whole[0], beside[1])


@pytest.mark.parametrize("name", OWN[:1])
@pytest.mark.parametrize("starts", [[1, 4], [0, 3], [0, 5], [0, 3, 2, 4]])
def test_starts_that_do_not_fit_are_refused(name: str, starts: list[int]) -> None:
    with back_end(name) as kernels, pytest.raises(ValueError, match="query_start"):
        summed(kernels, torch.zeros(4, 3), starts)
