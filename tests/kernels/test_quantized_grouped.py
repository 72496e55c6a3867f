"""Experts of quantized weights: each row has the bits of `quantized_linear` of its own expert's weights, alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_helpers import randn, same_bits, strided_rows
from quantized_cases import COLUMNS, INTEGER, layouts, random_weight

from quire.kernels import QuantizedWeight, RowKind, RowLayout
from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.quantized_experts import QuantizedExpertWeights
from tests.kernels.back_ends import CPU, back_end
from tests.kernels.linear_cases import lora_weights

F32, BF16 = torch.float32, torch.bfloat16
Layouts = Callable[[int, int], RowLayout]


def experts_of(
    count: int, widths: Sequence[int], layout: Layouts, dtype: torch.dtype, biases: bool = True
) -> QuantizedExpertWeights:
    """layout: of an expert and a weight's number. With biases, every second weight has one."""
    weights = [[random_weight(layout(e, i), width, 10 * e + i) for i, width in enumerate(widths)] for e in range(count)]
    own = [
        [
            randn(width, dtype=dtype, seed=e + width) if biases and (e + i) % 2 else None
            for i, width in enumerate(widths)
        ]
        for e in range(count)
    ]
    return QuantizedExpertWeights(weights, own)


def placed(counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, tokens) of so many rows of each expert."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return starts, torch.cat([torch.arange(count) for count in counts])


def check(kernels: Any, weights: QuantizedExpertWeights, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    starts, tokens = placed(counts)
    got = kernels.quantized_grouped_linear(x, starts, tokens, weights)
    assert got.shape == (len(x), weights.out_features) and got.dtype is x.dtype
    for e, (first, end) in enumerate(pairwise(starts.tolist())):
        for row in {first, (first + end) // 2, end - 1} if first < end else ():
            alone = kernels.quantized_linear(x[row : row + 1], weights.weights[e], weights.biases[e])
            assert same_bits(got[row : row + 1], alone), (e, row)
    return got


# No tokens for some experts, few for others, more than any tile for one.
COUNTS = ([1], [0, 1, 0], [3, 0, 1, 40, 5, 4, 6], [0, 0, 130], [4, 4, 4, 4, 4], [7] * 13)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(
    "kind", [RowKind.Q8_0, RowKind.Q4_K, RowKind.Q6_K, RowKind.INT8_ROWS], ids=lambda one: one.name
)
def test_whole_numbers(on_cpu: Any, dtype: torch.dtype, kind: RowKind, counts: list[int]) -> None:
    for features in (256, 1280):
        weights = experts_of(len(counts), (37, 5), lambda e, i: RowLayout(kind, features), dtype)  # noqa: B023
        check(on_cpu, weights, strided_rows(randn(sum(counts), features, dtype=dtype)), counts)


@pytest.mark.parametrize("kind", INTEGER, ids=lambda one: one.name)
def test_every_kind_of_whole_numbers(on_cpu: Any, kind: RowKind) -> None:
    features = 544 if COLUMNS[kind] < 256 else 768
    weights = experts_of(5, (9, 70), lambda e, i: RowLayout(kind, features), BF16)
    check(on_cpu, weights, randn(20, features, dtype=BF16), [1, 5, 0, 13, 1])


@pytest.mark.parametrize("number", range(len(layouts(256)) - len(INTEGER)))
def test_every_layout_of_floats(on_cpu: Any, dtype: torch.dtype, number: int) -> None:
    layout = [one for one in layouts(256) if one.kind not in INTEGER][number]
    weights = experts_of(4, (21, 2), lambda e, i: layout, dtype)
    x = strided_rows(randn(42, 256, dtype=dtype))
    got = check(on_cpu, weights, x, [1, 0, 4, 37])
    for row, expert in ((0, 0), (3, 2), (30, 3)):  # which are those of the unpacked weights
        floats = [one.dequantize().to(dtype) for one in weights.weights[expert]]
        assert same_bits(got[row : row + 1], on_cpu.linear(x[row : row + 1], floats, weights.biases[expert]))


def test_mixed_kinds(on_cpu: Any, dtype: torch.dtype) -> None:
    """Weights of an expert that go several ways, and experts that differ."""
    kinds = (RowKind.Q4_K, RowKind.F16, RowKind.Q8_0, RowKind.INT8_ROWS, RowKind.AFFINE4, RowKind.BF16, RowKind.F32)
    weights = experts_of(7, (8, 33, 1, 16), lambda e, i: RowLayout(kinds[(3 * e + i) % 7], 512), dtype)
    check(on_cpu, weights, randn(38, 512, dtype=dtype), [2, 9, 0, 20, 1, 5, 1])


def test_more_experts_than_turns(cpu: Any) -> None:
    """More memory for tokens than is taken at a time."""
    weights = experts_of(3, (8,), lambda e, i: RowLayout(RowKind.Q8_0, 8192), F32)
    x = randn(12, 8192, dtype=F32).repeat(450, 1)
    check(cpu, weights, x, [1800, 3, 3597])


def test_instruction_sets_agree(dtype: torch.dtype) -> None:
    kinds = (RowKind.Q4_0, RowKind.Q5_K, RowKind.MXFP4, RowKind.INT8_ROWS)
    weights = experts_of(4, (40, 3), lambda e, i: RowLayout(kinds[e], 256), dtype, biases=False)
    starts, tokens = placed([1, 8, 0, 30])
    x, found = randn(39, 256, dtype=dtype), []
    for isa in CPU:
        with back_end(isa) as native:
            if isa != "portable":  # which has no fused multiply-add
                found.append(native.quantized_grouped_linear(x, starts, tokens, weights))
    assert all(same_bits(one, found[0]) for one in found)


def test_a_token_does_not_depend_on_its_company(on_cpu: Any) -> None:
    weights = experts_of(6, (40, 40), lambda e, i: RowLayout((RowKind.Q4_0, RowKind.AFFINE8)[e % 2], 96), BF16)
    counts = [20, 7, 0, 1, 4, 5]
    starts, tokens = placed(counts)
    x = randn(37, 96, dtype=BF16)
    whole = on_cpu.quantized_grouped_linear(x, starts, tokens, weights)
    for kept in ([0, 1, 2, 20, 27], [3], [19, 21, 22, 36], list(range(5, 33))):
        own = torch.tensor(kept)
        some = torch.searchsorted(own, starts.long()).int()
        got = on_cpu.quantized_grouped_linear(x[own], some, tokens[own], weights)
        assert same_bits(got, whole[own])


SEGMENTS = [(0, 1, 0, 1.0), (1, 3, 1, 1.0), (3, 9, 2, 0.5), (3, 9, 0, -1.0), (12, 12, 0, 1.0), (15, 30, 1, 1.0)]
RANKS = {0: 5, 1: 40, 2: 1, 3: 0}


@pytest.mark.parametrize(
    "kinds",
    [(RowKind.Q8_0, RowKind.Q4_K), (RowKind.AFFINE4, RowKind.TABLE8), (RowKind.INT8_ROWS, RowKind.F16)],
    ids=str,
)
def test_a_rows_adapter_follows_it(on_cpu: Any, dtype: torch.dtype, kinds: tuple[RowKind, RowKind]) -> None:
    """A row is as `quantized_linear` makes it of its own expert's weights and its token's adapters, alone."""
    weights = experts_of(5, (130, 45), lambda e, i: RowLayout(kinds[(e + i) % 2], 256), dtype)
    tables: list[list[LoraTable | None]] = []
    for e in range(5):
        tables.append([LoraTable(256, width, dtype) if (e, i) != (2, 1) else None for i, width in enumerate((130, 45))])
        for i, table in enumerate(tables[-1]):
            for slot, rank in RANKS.items() if table is not None else ():
                assert table is not None
                own = lora_weights(on_cpu, rank, 256, (130, 45)[i], dtype, 100 * slot + 10 * e + i, slot % 2 == 1, True)
                table.put(slot, own)
    counts = [1, 30, 0, 4, 11]
    starts, tokens = placed(counts)
    x = randn(46, 256, dtype=dtype)
    got = on_cpu.quantized_grouped_linear(x, starts, tokens, weights, tables, LoraSegments.of(SEGMENTS, 30))
    base = on_cpu.quantized_grouped_linear(x, starts, tokens, weights)
    for e, (first, end) in enumerate(pairwise(starts.tolist())):
        for row in range(first, end):
            token = int(tokens[row])
            mine = [(0, 1, slot, share) for one, last, slot, share in SEGMENTS if one <= token < last]
            alone = on_cpu.quantized_linear(
                x[row : row + 1], weights.weights[e], weights.biases[e], None, tables[e], LoraSegments.of(mine, 1)
            )
            assert same_bits(got[row : row + 1], alone), (e, row)
            assert mine or same_bits(got[row], base[row])
    assert not same_bits(got, base)


def test_nothing_to_do(on_cpu: Any) -> None:
    weights = experts_of(2, (6,), lambda e, i: RowLayout(RowKind.Q8_0, 64), F32)
    got = on_cpu.quantized_grouped_linear(torch.zeros(0, 64), *placed([0, 0]), weights)
    assert got.shape == (0, 6)


def test_weights_that_do_not_fit_are_refused() -> None:
    layout = RowLayout(RowKind.Q8_0, 64)
    good = random_weight(layout, 4)
    apart = QuantizedWeight(torch.zeros(4, 136, dtype=torch.uint8)[:, :68], layout)
    wrong = QuantizedWeight(torch.zeros(4, 69, dtype=torch.uint8), layout)
    for bad, message in (
        (random_weight(RowLayout(RowKind.Q8_0, 32), 4), "rows of 64 columns, got 32"),
        (random_weight(layout, 3), r"\[4, 68\] torch.uint8"),
        (wrong, r"got \[4, 69\]"),
        (apart, "contiguous rows"),
    ):
        with pytest.raises(ValueError, match=rf"weights\[1\]\[0\]: expected .*{message}"):
            QuantizedExpertWeights([[good], [bad]])
    for bias in (torch.zeros(5), torch.zeros(4).half(), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"biases\[1\]\[0\]: expected \[4\] torch.float32"):
            QuantizedExpertWeights([[good], [good]], [[torch.zeros(4)], [bias]])
