"""Numbers by head and distance that are added to scores (arXiv:1910.10683)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import check, page, stream
from kernel_helpers import same_bits
from test_attention_options import ends_of, everything

F32 = torch.float32


def biases_of(heads: int, reach: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(heads, 2 * reach + 1, generator=torch.Generator().manual_seed(seed)) * 2


def test_a_gpu_says_that_it_has_none(cuda: Any) -> None:
    call = page([(stream(3), 0, 3)], biases=biases_of(2, 4))
    with pytest.raises(RuntimeError, match="for the CPU alone"):
        call.run(cuda)


@pytest.mark.parametrize("reach", [0, 1, 7, 40, 128, 900])
@pytest.mark.parametrize(("heads", "dim"), [((3, 1), 20), ((4, 4), 64)])
def test_biases_match_float64(on_cpu: Any, reach: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    own, biases = stream(700, heads, dim, dtype), biases_of(heads[0], reach)
    chunks = [(own, 0, 150), (own, 699, 700), (own, 500, 530), (own, 0, 1)]
    check(on_cpu, chunks, biases=biases)
    check(on_cpu, chunks, 5, biases=biases, visible_end=ends_of(chunks, []))
    check(on_cpu, chunks, 64, biases=biases, window=70, stale=True)


def test_with_all_other_options(on_cpu: Any) -> None:
    heads = (6, 2)
    chunks = [(stream(end, heads, 32, F32, end), start, end) for start, end in [(60, 200), (19, 20), (0, 61)]]
    check(on_cpu, chunks, biases=biases_of(6, 9), **everything(6, window=65))
    check(on_cpu, chunks, biases=biases_of(6, 9), int8=True)


def test_the_same_bits_in_any_company(on_cpu: Any, dtype: torch.dtype) -> None:
    own, biases = stream(300, (4, 2), 64, dtype), biases_of(4, 33)
    whole = page([(own, 0, 300)], biases=biases).run(on_cpu)
    parts = [(own, start, min(start + 37, 300)) for start in range(0, 300, 37)]
    assert same_bits(page(parts, 5, biases=biases).run(on_cpu), whole)
    assert not torch.allclose(page([(own, 0, 300)]).run(on_cpu), whole)
