"""Heads in another order: copies to the bit, which are recorded."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.layers import grouped_heads, head_order
from quire.layers.heads import HeadOrder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "queries", "size"), [(4, 1, 8), (2, 3, 5), (1, 7, 64)])
def test_each_head_goes_to_its_place(groups: int, queries: int, size: int, dtype: torch.dtype) -> None:
    fused = torch.randn(6, groups * (queries + 2) * size).to(dtype)
    parts = fused.view(6, groups, queries + 2, size).split([queries, 1, 1], 2)
    want = torch.cat([part.reshape(6, -1) for part in parts], 1)
    assert torch.equal(grouped_heads(groups, queries)(fused), want)


def test_an_order_is_made_once_and_grows() -> None:
    assert grouped_heads(2, 3) is grouped_heads(2, 3)
    order = HeadOrder((2, 0, 1))
    for tokens in (1, 700, 3, 5000, 700):
        fused = torch.randn(tokens, 6)
        assert torch.equal(order(fused), fused.view(tokens, 3, 2)[:, [2, 0, 1]].reshape(tokens, 6))
    assert head_order((0, 1)) is head_order((0, 1))


@pytest.mark.skipif(
    kernels.backend().__name__ != "quire.kernels.native", reason="steps are recorded by the CPU's kernels"
)
def test_the_copy_is_recorded() -> None:
    from quire.kernels import recording

    fused, order = torch.randn(64, 4 * 3 * 8), grouped_heads(4, 1)
    recorded = recording.record(lambda: order(fused), recording.Workspace())
    fused.normal_()
    recorded.replay()
    assert torch.equal(recorded.results, order(fused))
