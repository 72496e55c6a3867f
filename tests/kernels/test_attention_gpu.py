"""What a GPU's paged attention has beside the others: orders of warps and copies, a workspace, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import check, page, stream
from kernel_helpers import same_bits


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """The oracle's products are small."""


def test_mixed_batches(cuda: Any, dtype: torch.dtype, order: int) -> None:
    chunks = [
        (stream(end, (4, 2), 64, dtype, seed=end), start, end)
        for start, end in [(0, 1), (40, 41), (0, 67), (100, 131), (129, 130), (60, 64)]
    ]
    check(cuda, chunks, 8)


@pytest.mark.parametrize("dim", [64, 256])
def test_pipelines_in_every_order(cuda: Any, dim: int, order: int) -> None:
    own = stream(580, (1, 1), dim)
    check(cuda, [(own, 579, 580), (own, 570, 580), (own, 100, 101)])


def test_a_cache_too_wide_for_partial_results(cuda: Any) -> None:
    """A block of threads then goes over all of a sequence's spans itself."""
    subject = stream(1100, (2, 1), 16)
    chunks = [(subject, 1099, 1100), (subject, 512, 513)]
    assert cuda._cuda.attention_workspace(2, 2, 16, 1, 16, 69, 2, 1) > 0
    assert cuda._cuda.attention_workspace(2, 2, 16, 1, 1 << 15, 1 << 15, 2, 1) == 0
    wide = page(chunks, 1 << 15, width=1 << 15)
    assert same_bits(wide.run(cuda), page(chunks).run(cuda))


def test_padding_rows_are_zero(cuda: Any, dtype: torch.dtype) -> None:
    """A CUDA graph's batch is filled up with sequences of one token and no context."""
    own = stream(600, (20, 1), 20, dtype)
    call = page([(own, 599, 600), (own, 99, 100), (own, 9, 10)])
    alone = page([(own, 599, 600)]).run(cuda)
    call.context_len[1:] = 0
    call.block_table[1:] = -1
    out = call.run(cuda)
    assert same_bits(out[:1], alone)
    assert (out[1:] == 0).all()


def test_tokens_before_the_context_are_zero(cuda: Any, dtype: torch.dtype) -> None:
    own = stream(100, (2, 1), 64, dtype)
    call = page([(own, 10, 30), (own, 0, 9), (own, 98, 99)])
    call.context_len[0], call.context_len[1] = 5, 0
    call.block_table[1] = -1
    out = call.run(cuda)
    assert (out[:15] == 0).all() and (out[20:29] == 0).all()
    assert same_bits(out[15:20], page([(replace(own, query=own.query[25:30]), 0, 5)]).run(cuda))


def test_block_ids_that_point_nowhere(cuda: Any, dtype: torch.dtype) -> None:
    own = stream(100, (2, 1), 64, dtype)
    for chunk in [(own, 99, 100), (own, 60, 100)]:
        call = page([chunk])
        for block in (-1, 1 << 30, len(call.keys)):
            call.block_table[0, 2] = block
            assert call.run(cuda).isfinite().all()
        call = replace(page([chunk]), context_len=torch.tensor([1 << 30], dtype=torch.int32))
        call.keys.nan_to_num_(), call.values.nan_to_num_()  # all that the table has room for
        assert call.run(cuda).isfinite().all()


def test_what_cannot_be_served_is_said(cuda: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="257"):
        page([(stream(3, dim=257, dtype=dtype), 2, 3)]).run(cuda)
    with pytest.raises(ValueError, match="heads"):
        cuda._cuda.attention_workspace(1, 3, 16, 2, 16, 1, 1, 1)
