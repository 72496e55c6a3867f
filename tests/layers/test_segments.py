"""Attention of rows that see all of their segment: torch's by segment, and the same bits whoever else is there."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional

from quire.layers import Segments
from quire.models.vision.segment_tower import _Layouts

SCALE = 0.37


def rows(lengths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value, as slices of one product: [T, 3, 20]."""
    torch.manual_seed(1)
    return list(torch.randn(sum(lengths), 3, 3, 20).to(dtype).unbind(1))


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("way", ["attend", "_by_torch"])  # the second is a GPU's
@pytest.mark.parametrize("lengths", [[1], [70], [4, 64, 3, 1, 130], [16] * 9])
def test_rows_see_their_segment(lengths: list[int], way: str) -> None:
    own = rows(lengths, torch.float32)
    found = getattr(Segments(starts(lengths)), way)(*own, SCALE)
    parts = zip(*(one.transpose(0, 1).split(lengths, dim=1) for one in own), strict=True)
    expected = [functional.scaled_dot_product_attention(*part, scale=SCALE) for part in parts]
    torch.testing.assert_close(found, torch.cat(expected, dim=1).transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_other_segments(dtype: torch.dtype) -> None:
    lengths = [40, 64, 7, 150]
    own = rows(lengths, dtype)
    together = Segments(starts(lengths)).attend(*own, SCALE).split(lengths)
    for number, parts in enumerate(zip(*(one.split(lengths) for one in own), strict=True)):
        alone = Segments(starts([lengths[number]])).attend(*parts, SCALE)
        assert torch.equal(alone, together[number])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_layers_have_in_common_goes_with_its_tensor(dtype: torch.dtype) -> None:
    layouts = _Layouts()
    given = starts([4, 5]).to(dtype)
    assert layouts.segments(given) is layouts.segments(given) and len(layouts._segments) == 1
    del given
    gc.collect()
    assert len(layouts._segments) == 0
