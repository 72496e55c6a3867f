"""What adapters add to `linear`, against float64; and the promise: a row depends on its own adapter alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import is_gpu, randn, same_bits, strided_rows
from linear_cases import F32, Product, lora_weights

from quire.kernels.adapters import LoraSegments, LoraTable, Segment

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a GPU's kernels keep between their launches start as NaN too."""

    def empty(shape: int | tuple[int, ...], dtype: torch.dtype, **options: Any) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else shape
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", empty)


def check_close(kernels: Any, dtype: torch.dtype, shape: Any, odd: bool, counts: tuple[int, ...]) -> None:
    features, widths, ranks = shape
    product = Product(kernels, features, widths, dict(enumerate(ranks)), dtype, odd)
    for tokens in counts:
        middle, last = tokens // 3, len(ranks) - 1
        rows = [(0, middle, 0, 1.0), (middle, tokens - 1, last, 0.5), (middle, tokens - 1, 0, -2.0)]
        x = randn(tokens, features, dtype=dtype, seed=tokens)
        x = strided_rows(x) if odd else x
        for out_dtype in {dtype, F32}:
            product.check(x, rows, out_dtype)


# Features, columns of each weight, ranks of the adapters.
SMALL = [
    (1, [1], [1]), (16, [31], [4, 1]), (33, [32, 5, 64], [3, 0, 8]), (96, [65, 8], [16, 5, 24]),
    (136, [160, 16, 16, 48], [64, 1, 8]), (40, [300], [80, 4]), (520, [48], [16, 8]),
]  # fmt: skip
LARGE = [
    (100, [65], [16, 33, 5]), (256, [64, 16, 16], [64, 1]), (40, [700], [256, 2]), (8, [1030, 3], [7, 1]),
    (2000, [130], [40, 3]),
]  # fmt: skip


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "anywhere"])
def test_close_to_float64(kernels: Any, dtype: torch.dtype, shape: Any, odd: bool) -> None:
    check_close(kernels, dtype, shape, odd, (1, 2, 9, 30, 70))


@pytest.mark.parametrize("shape", [*SMALL[:3], *LARGE])
def test_close_to_float64_for_more_tokens(quick: Any, dtype: torch.dtype, shape: Any) -> None:
    check_close(quick, dtype, shape, True, (1, 2, 7, 30, 61, 130))


def test_parts_of_many_features(kernels: Any) -> None:
    product = Product(kernels, 2080, [40], {0: 24, 1: 5}, BF16)
    product.check(randn(70, 2080, dtype=BF16), [(0, 40, 0, 1.0), (40, 69, 1, 1.0)])


RANKS = {0: 5, 1: 64, 2: 1, 3: 24, 4: 0, 5: 16, 6: 8, 8: 33}
MIXTURE = [
    (0, 1, 0, 1.0), (1, 2, 1, 1.0), (2, 12, 2, 0.5), (2, 12, 3, 0.5), (2, 12, 1, -1.0), (14, 15, 4, 1.0),
    (15, 15, 0, 1.0), (15, 55, 5, 1.0), (55, 56, 5, 0.5), (55, 56, 9, 0.5), (56, 90, 3, 1.0), (91, 92, 6, 1.0),
]  # fmt: skip
OTHERS = [(0, 20, 0, 1.0), (22, 23, 1, 1.0), (23, 53, 2, 0.5), (23, 53, 8, 0.5), (53, 59, 1, 1.0)]


@pytest.mark.parametrize(("features", "mixture"), [(36, MIXTURE), (136, MIXTURE), (77, OTHERS)])
def test_a_row_does_not_depend_on_its_company(
    kernels: Any, dtype: torch.dtype, features: int, mixture: list[Segment]
) -> None:
    product = Product(kernels, features, [130, 45], RANKS, dtype)
    x = randn(93, features, dtype=dtype)
    together = product.check(x, mixture)
    spans = [(0, 20), (10, 56), (50, 93), (3, 8), (19, 24), (24, 60), (0, 59), *((row, row + 1) for row in range(93))]
    for start, end in spans:
        own = [(max(s, start) - start, min(e, end) - start, slot, w) for s, e, slot, w in mixture]
        own = [segment for segment in own if segment[0] < segment[1]]
        assert same_bits(product(x[start:end], own), together[start:end]), (start, end)


def test_a_row_does_not_depend_on_other_ranks(kernels: Any, dtype: torch.dtype) -> None:
    """On a GPU, larger ranks in the table, and room for more layers, make another workspace and another kernel."""
    x = randn(70, 48, dtype=dtype)
    rows = [(0, 3, 0, 1.0), (3, 66, 2, 1.0), (67, 69, 0, 0.5), (67, 69, 2, 0.5)]
    wanted = Product(kernels, 48, [72], {0: 5, 2: 12}, dtype).check(x, rows)
    for rank in (16, 17, 63, 100):
        product = Product(kernels, 48, [72], {0: 5, 2: 12, 3: rank}, dtype)
        assert same_bits(product(x, rows), wanted), rank
        assert same_bits(product(x, [*rows[:1], (3, 66, 2, 1.0), (67, 69, 0, 0.5), (67, 69, 2, 0.5)]), wanted)
    segments = LoraSegments(40, 70, layers=3)
    segments.fill(rows)
    got = kernels.linear(x, product.weights, product.biases, None, product.tables, segments)
    assert same_bits(got, wanted)


def test_every_rank(kernels: Any) -> None:
    for rank in (1, 4, 5, 8, 12, 16, 17, 24, 32, 64):
        product = Product(kernels, 40, [36], {0: rank}, BF16)
        x = randn(67, 40, dtype=BF16, seed=rank)
        together = product.check(x, [(0, 1, 0, 1.0), (1, 66, 0, 0.5)])
        assert same_bits(product(x[:1], [(0, 1, 0, 1.0)]), together[:1])
        assert same_bits(product(x[40:66], [(0, 26, 0, 0.5)]), together[40:66])


def test_more_segments_than_a_warp_looks_at(kernels: Any, dtype: torch.dtype) -> None:
    """Segments that are padding lie between others; some rows are named often."""
    product = Product(kernels, 24, [40], RANKS, dtype)
    real = [(row, row + 1, row % 7, 1.0) for row in range(40)]
    real += [(40 + 3 * (i // 3), 43 + 3 * (i // 3), i % 7, 0.25) for i in range(60)]
    x = randn(100, 24, dtype=dtype)
    wanted = product.check(x, real)
    padded = list(real)
    padded[40:40] = [(40, 40, 0, 1.0)] * 150
    padded[20:20] = [(0, 0, 0, 0.0)] * 7
    assert len(padded) > 256
    segments = LoraSegments(400, 100, layers=3)
    segments.fill(padded)
    got = kernels.linear(x, product.weights, product.biases, None, product.tables, segments)
    assert same_bits(got, wanted)


def test_empty_slots_and_tables_change_nothing(kernels: Any, dtype: torch.dtype) -> None:
    x = randn(12, 24, dtype=dtype)
    product = Product(kernels, 24, [40, 16, 8, 24], {0: 8}, dtype)
    base = product(x, None)
    assert same_bits(product(x, [(0, 12, 1, 1.0)]), base)
    one = product.check(x, [(0, 12, 0, 1.0)])
    assert product.tables[1] is not None
    product.tables[1].drop(0)
    less = product.check(x, [(0, 12, 0, 1.0)])
    assert same_bits(less[:, 40:56], base[:, 40:56])
    assert same_bits(less[:, :40], one[:, :40]) and same_bits(less[:, 56:], one[:, 56:])
    product.tables[:] = [None] * 4
    assert same_bits(product(x, [(0, 12, 0, 1.0)]), base)


def test_no_rank_at_all(kernels: Any, dtype: torch.dtype) -> None:
    product = Product(kernels, 24, [40, 5], {0: 0, 1: 0}, dtype)
    for tokens in (3, 66):
        product.check(randn(tokens, 24, dtype=dtype), [(0, 1, 0, 1.0), (1, tokens - 1, 1, 0.5)])


def test_more_weights_than_one_launch_takes(kernels: Any) -> None:
    product = Product(kernels, 40, [8, 16, 3, 30, 8, 8, 140, 8, 9, 8, 8, 1, 8, 16, 2, 7], {0: 8, 1: 5}, BF16)
    product.check(randn(12, 40, dtype=BF16), [(0, 5, 0, 1.0), (5, 11, 1, 1.0)])


@pytest.mark.parametrize("features", [90, 3000])
def test_adapters_across_parts_of_the_tokens(quick: Any, dtype: torch.dtype, features: int) -> None:
    product = Product(quick, features, [160, 33], {0: 5, 1: 40}, dtype)
    x = randn(150, features, dtype=dtype)
    rows = [(0, 40, 0, 1.0), (45, 130, 1, 0.5), (45, 130, 0, 0.25), (130, 131, 1, 1.0)]
    together = product(x, rows)
    for i in range(0, 150, 7):
        own = [(0, 1, slot, weight) for start, end, slot, weight in rows if start <= i < end]
        assert same_bits(product(x[i : i + 1], own), together[i : i + 1]), i
    base = product(x, None)
    assert same_bits(together[40:45], base[40:45]) and same_bits(together[131:], base[131:])


def test_a_slot_is_emptied_and_filled_again(kernels: Any) -> None:
    table = LoraTable(16, 40, F32, slots=1, row_major=kernels.ROW_MAJOR_B)
    weight, x = torch.zeros(40, 16), randn(3, 16, dtype=F32)

    def run(slot: int) -> torch.Tensor:
        return kernels.linear(x, [weight], [None], None, [table], LoraSegments.of([(0, 3, slot, 1.0)], 3))

    assert not table.put(0, lora_weights(kernels, 4, 16, 40, F32, 1, extras=False, odd=True))
    first = run(0)
    assert first.abs().sum() > 0
    assert table.put(5, lora_weights(kernels, 2, 16, 40, F32, 2, extras=True, odd=True)), "the table has moved"
    assert same_bits(run(0), first) and not same_bits(run(5), first)
    table.drop(0)
    table.drop(0)
    assert torch.equal(run(0), torch.zeros(3, 40)) and len(table) == 1


def test_what_points_nowhere_is_passed_over(cuda: Any, dtype: torch.dtype) -> None:
    """A GPU cannot raise. The CPU's refusals are in test_lora_cpu.py."""
    assert is_gpu(cuda)
    product = Product(cuda, 24, [40], {0: 8, 1: 4}, dtype)
    x = randn(20, 24, dtype=dtype)
    base, wanted = product(x, None), product(x, [(15, 20, 0, 1.0)])
    got = product(x, [(0, 5, -1, 1.0), (5, 9, 2, 1.0), (9, 12, 1 << 40, 1.0), (15, 31, 0, 1.0)])
    assert same_bits(got, wanted) and same_bits(got[:15], base[:15])
    assert same_bits(product(x, [(-3, 4, 0, 1.0)])[:4], product(x, [(0, 4, 0, 1.0)])[:4])
    assert same_bits(product(x, [(25, 30, 0, 1.0), (-5, 0, 1, 1.0)]), base)
    assert same_bits(product(x, []), base)
    for slot in (-1, 2, 5):
        got = product(x, [(15, 20, slot, 1.0), (15, 20, 0, 1.0), (15, 20, slot, 1.0)])
        assert same_bits(got, wanted)
    segments = LoraSegments(4, 20)
    segments.fill([(15, 20, 0, 1.0), (15, 20, 1, 1.0)])  # one layer more than it has room for
    assert same_bits(cuda.linear(x, product.weights, product.biases, None, product.tables, segments), wanted)


@pytest.mark.parametrize("tokens", [6, 80])
def test_any_order_of_warps_and_copies(cuda: Any, order: int, tokens: int) -> None:
    product = Product(cuda, 136, [130], {0: 24, 1: 5}, BF16)
    product.check(randn(tokens, 136, dtype=BF16), [(0, tokens - 2, 0, 0.5), (0, tokens - 2, 1, 0.5)])
