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
    assert cuda._cuda.attention_workspace(2, 2, 16, 16, 1, 16, 69, 2, 1) > 0
    assert cuda._cuda.attention_workspace(2, 2, 16, 16, 1, 1 << 15, 1 << 15, 2, 1) == 0
    wide = page(chunks, 1 << 15, width=1 << 15)
    assert same_bits(wide.run(cuda), page(chunks).run(cuda))


ALL = {"softcap": 4.0, "window": 700}


@pytest.mark.parametrize("more", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(("dim", "value_dim"), [(288, 256), (576, 512), (60, 300)])
def test_bits_of_wide_heads(cuda: Any, dim: int, value_dim: int, more: dict[str, Any], order: int) -> None:
    """Latent attention's: a token alone or in a chunk, its spans shared out or not, beside others."""
    heads = (18, 1)
    options = {**more, "sinks": torch.linspace(-2, 3, 18), "head_scales": torch.linspace(0.5, 2, 18)} if more else {}
    subject = stream(1040, heads, dim, value_dim=value_dim)
    whole = page([(subject, 1022, 1026)], apart=64, **options).run(cuda)
    check(cuda, [(subject, 1022, 1026)], **options)
    other = stream(30, heads, dim, seed=1, value_dim=value_dim)
    singles = page([(subject, 1023, 1024), (other, 29, 30), (subject, 1024, 1025)], 8, **options)
    assert same_bits(singles.run(cuda)[[0, 2]], whole[1:3])
    wide = page([(subject, 1023, 1024)], 1 << 14, width=1 << 16, **options)  # no room for partial results
    assert cuda._cuda.attention_workspace(1, 18, dim, value_dim, 1, 1 << 14, 1 << 16, 1, 1) == 0
    assert same_bits(wide.run(cuda), whole[1:2])
    mixed = page([(other, 29, 30), (subject, 1023, 1026), (other, 10, 12)], **options).run(cuda)
    assert same_bits(mixed[1:4], whole[1:])


def test_ranges_of_wide_heads(cuda: Any) -> None:
    own = stream(140, (5, 1), 288, value_dim=256)
    ends = torch.tensor([90] * 10 + [140] * 50, dtype=torch.int32)
    check(cuda, [(own, 80, 140)], visible_end=ends)
    call = page([(own, 80, 140)], visible_end=ends)
    early = page([(own, 80, 90)], visible_end=ends[:10])
    assert same_bits(early.run(cuda), call.run(cuda)[:10])


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
    with pytest.raises(ValueError, match="keys of 1 to 576 elements a head, not 577"):
        page([(stream(3, dim=577, dtype=dtype, value_dim=8), 2, 3)]).run(cuda)
    with pytest.raises(ValueError, match="values of 1 to 512 elements a head, not 513"):
        page([(stream(3, dim=513, dtype=dtype), 2, 3)]).run(cuda)
    with pytest.raises(ValueError, match="heads"):
        cuda._cuda.attention_workspace(1, 3, 16, 16, 2, 16, 1, 1, 1)
