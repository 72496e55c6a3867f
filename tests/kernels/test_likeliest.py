"""The likeliest token of each row: the first of the largest, and none where that is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.back_ends import OWN, back_end


@pytest.mark.parametrize("name", ["reference", *OWN])
@pytest.mark.parametrize("columns", [1, 5, 384, 1024, 1025, 4999, 32000])
def test_the_first_of_the_largest(name: str, columns: int) -> None:
    draw = np.random.default_rng(columns)
    rows = draw.integers(-40, 9, (33, columns)).astype(np.float32)  # with many equals
    rows[1] = draw.normal(size=columns)
    rows[2], rows[3] = -np.inf, 3e38
    rows[4, -1], rows[5, 0], rows[6, columns // 2] = 50, np.nan, np.inf
    rows[7, -1] = np.nan
    rows[8, columns // 3] = -np.inf
    rows[9] = -0.0
    best = rows.argmax(axis=1)
    expected = np.where(np.isfinite(rows[np.arange(33), best]), best, -1)
    with back_end(name) as kernels:
        found = kernels.likeliest(torch.from_numpy(rows))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", OWN[:1])
def test_what_it_refuses(name: str) -> None:
    with back_end(name) as kernels:
        for wrong in (torch.zeros(2, 0), torch.zeros(4, 6)[:, :3], torch.zeros(2, 3, dtype=torch.float64)):
            with pytest.raises((ValueError, TypeError)):
                kernels.likeliest(wrong)
        assert kernels.likeliest(torch.zeros(0, 3)).tolist() == []
