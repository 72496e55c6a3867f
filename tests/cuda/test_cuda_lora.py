"""What adapters add to the GPU's `linear`, against float64; and the promise: a row depends on its own alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, Segment
from tests.cuda.test_cuda_linear import ROUNDING, assert_close, misaligned, randn, same_bits, strided

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the kernels keep between their launches start as NaN too."""

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(*shape, torch.nan, **options)

    monkeypatch.setattr(torch, "empty", empty)


def weights(
    rank: int, features: int, columns: int, dtype: torch.dtype, seed: int, extras: bool, odd: bool = False
) -> LoraWeights:
    def lay(x: torch.Tensor) -> torch.Tensor:
        return misaligned(x) if odd else x

    a = lay(randn(rank, features, dtype=dtype, seed=seed)) if rank else None
    b = lay(randn(columns, rank, dtype=dtype, seed=seed + 1)) if rank else None
    scale = lay(randn(columns, dtype=F32, seed=seed + 2)) if extras else None
    shift = lay(randn(columns, dtype=F32, seed=seed + 3)) if extras or not rank else None
    return LoraWeights(a, b, (0.25 + seed % 3) / 4, scale, shift, row_major=True)


class Product:
    """A call of `linear` with adapters: weights of some widths, of which every third has no table."""

    def __init__(
        self,
        cuda: ModuleType,
        features: int,
        widths: list[int],
        ranks: dict[int, int],
        dtype: torch.dtype,
        odd: bool = False,
    ) -> None:
        """ranks: of the adapter in each slot; those of odd slots scale and shift besides. odd: at any address."""
        self.cuda = cuda
        self.weights = [randn(n, features, dtype=dtype, seed=n) for n in widths]
        self.biases = [randn(n, dtype=dtype, seed=n) if i % 2 else None for i, n in enumerate(widths)]
        self.tables: list[LoraTable | None] = []
        for layer, columns in enumerate(widths):
            table = LoraTable(features, columns, dtype, 2, row_major=True) if layer % 3 != 2 else None
            for slot, rank in ranks.items() if table is not None else ():
                table.put(slot, weights(rank, features, columns, dtype, 10 * slot + layer, slot % 2 == 1, odd))
            self.tables.append(table)

    def __call__(
        self, x: torch.Tensor, rows: list[Segment] | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if rows is None:
            return self.cuda.linear(x, self.weights, self.biases, out_dtype)
        return self.cuda.linear(x, self.weights, self.biases, out_dtype, self.tables, LoraSegments.of(rows, len(x)))

    def exact(self, x: torch.Tensor, y: torch.Tensor, rows: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """What becomes of y in float64, and a bound on what float32 sums and the rounding of x a^T may lose."""
        out, error = y.double().clone(), torch.zeros_like(y, dtype=torch.float64)
        for start, end, slot, weight in rows:
            first = 0
            for table, own_weight in zip(self.tables, self.weights, strict=True):
                columns = len(own_weight)
                own = None if table is None else table.get(slot)
                part, bound = out[start:end, first : first + columns], error[start:end, first : first + columns]
                first += columns
                if own is None:
                    continue
                if own.a is not None:
                    wide, a, b = x[start:end].double(), own.a.double(), own.b.double()
                    hidden, factor = wide @ a.T, own.scaling * weight
                    part += hidden @ b.T * factor
                    bound += hidden.abs() @ b.abs().T * abs(factor) * ROUNDING[x.dtype] * 1.01
                    size = wide.abs() @ a.abs().T @ b.abs().T * abs(factor)
                    bound += size * (x.shape[1] / 8 + own.rank + 16) * ROUNDING[F32]
                if own.scale is not None:
                    part *= own.scale.double()
                    bound *= own.scale.double().abs()
                if own.shift is not None:
                    part += own.shift.double()
                    bound += (part.abs() + own.shift.double().abs() * 2) * ROUNDING[F32] * 4
                bound += (part.abs() + bound) * ROUNDING[F32] * 4
        return out, error

    def check(self, x: torch.Tensor, rows: list[Segment], out_dtype: torch.dtype | None = None) -> torch.Tensor:
        base, got = self(x, None, out_dtype), self(x, rows, out_dtype)
        assert_close(got, *self.exact(x, base, rows))
        for row in range(len(x)):
            if not any(start <= row < end for start, end, _, _ in rows):
                assert same_bits(got[row], base[row])
        return got


@pytest.mark.parametrize(
    ("features", "widths", "ranks"),
    [
        (1, [1], [1]), (16, [31], [4, 1]), (33, [32, 5, 64], [3, 0, 8]), (96, [65, 8], [16, 5, 24]),
        (136, [160, 16, 16, 48], [64, 1, 8]), (40, [300], [80, 4]), (520, [48], [16, 8]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "anywhere"])
def test_close_to_float64(
    cuda: ModuleType, dtype: torch.dtype, features: int, widths: list[int], ranks: list[int], odd: bool
) -> None:
    product = Product(cuda, features, widths, dict(enumerate(ranks)), dtype, odd)
    for tokens in (1, 2, 9, 30, 70):
        middle, last = tokens // 3, len(ranks) - 1
        rows = [(0, middle, 0, 1.0), (middle, tokens - 1, last, 0.5), (middle, tokens - 1, 0, -2.0)]
        x = randn(tokens, features, dtype=dtype, seed=tokens)
        x = strided(x, 5) if odd else x
        for out_dtype in {dtype, F32}:
            product.check(x, rows, out_dtype)


def test_parts_of_many_features(cuda: ModuleType) -> None:
    product = Product(cuda, 2080, [40], {0: 24, 1: 5}, BF16)
    product.check(randn(70, 2080, dtype=BF16), [(0, 40, 0, 1.0), (40, 69, 1, 1.0)])


RANKS = {0: 5, 1: 64, 2: 1, 3: 24, 4: 0, 5: 16, 6: 8}
MIXTURE = [
    (0, 1, 0, 1.0), (1, 2, 1, 1.0), (2, 12, 2, 0.5), (2, 12, 3, 0.5), (2, 12, 1, -1.0), (14, 15, 4, 1.0),
    (15, 15, 0, 1.0), (15, 55, 5, 1.0), (55, 56, 5, 0.5), (55, 56, 9, 0.5), (56, 90, 3, 1.0), (91, 92, 6, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("features", [36, 136])
def test_a_row_does_not_depend_on_its_company(cuda: ModuleType, dtype: torch.dtype, features: int) -> None:
    product = Product(cuda, features, [130, 44], RANKS, dtype)
    x = randn(93, features, dtype=dtype)
    together = product.check(x, MIXTURE)
    for start, end in [(0, 20), (10, 56), (50, 93), *((row, row + 1) for row in range(93))]:
        own = [(max(s, start) - start, min(e, end) - start, slot, w) for s, e, slot, w in MIXTURE]
        own = [segment for segment in own if segment[0] < segment[1]]
        assert same_bits(product(x[start:end], own), together[start:end]), (start, end)


def test_a_row_does_not_depend_on_other_ranks(cuda: ModuleType, dtype: torch.dtype) -> None:
    """Larger ranks in the table, and room for more layers, make another workspace and another kernel."""
    x = randn(70, 48, dtype=dtype)
    rows = [(0, 3, 0, 1.0), (3, 66, 2, 1.0), (67, 69, 0, 0.5), (67, 69, 2, 0.5)]
    wanted = Product(cuda, 48, [72], {0: 5, 2: 12}, dtype).check(x, rows)
    for rank in (16, 17, 63, 100):
        product = Product(cuda, 48, [72], {0: 5, 2: 12, 3: rank}, dtype)
        assert same_bits(product(x, rows), wanted), rank
        assert same_bits(product(x, [*rows[:1], (3, 66, 2, 1.0), (67, 69, 0, 0.5), (67, 69, 2, 0.5)]), wanted)
    segments = LoraSegments(40, 70, layers=3)
    segments.fill(rows)
    got = cuda.linear(x, product.weights, product.biases, None, product.tables, segments)
    assert same_bits(got, wanted)


def test_every_rank(cuda: ModuleType) -> None:
    for rank in (1, 4, 5, 8, 12, 16, 17, 24, 32, 64):
        product = Product(cuda, 40, [36], {0: rank}, BF16)
        x = randn(67, 40, dtype=BF16, seed=rank)
        together = product.check(x, [(0, 1, 0, 1.0), (1, 66, 0, 0.5)])
        assert same_bits(product(x[:1], [(0, 1, 0, 1.0)]), together[:1])
        assert same_bits(product(x[40:66], [(0, 26, 0, 0.5)]), together[40:66])


def test_more_segments_than_a_warp_looks_at(cuda: ModuleType, dtype: torch.dtype) -> None:
    """Segments that are padding, or out of the call, lie between others; some rows are named often."""
    product = Product(cuda, 24, [40], RANKS, dtype)
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
    got = cuda.linear(x, product.weights, product.biases, None, product.tables, segments)
    assert same_bits(got, wanted)


def test_what_points_nowhere_is_passed_over(cuda: ModuleType, dtype: torch.dtype) -> None:
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


def test_empty_slots_and_tables_change_nothing(cuda: ModuleType, dtype: torch.dtype) -> None:
    x = randn(12, 24, dtype=dtype)
    product = Product(cuda, 24, [40, 16, 8, 24], {0: 8}, dtype)
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


def test_no_rank_at_all(cuda: ModuleType, dtype: torch.dtype) -> None:
    product = Product(cuda, 24, [40, 5], {0: 0, 1: 0}, dtype)
    for tokens in (3, 66):
        product.check(randn(tokens, 24, dtype=dtype), [(0, 1, 0, 1.0), (1, tokens - 1, 1, 0.5)])


def test_more_weights_than_one_launch_takes(cuda: ModuleType) -> None:
    product = Product(cuda, 40, [8, 16, 3, 30, 8, 8, 140, 8, 9, 8, 8, 1, 8, 16, 2, 7], {0: 8, 1: 5}, BF16)
    product.check(randn(12, 40, dtype=BF16), [(0, 5, 0, 1.0), (5, 11, 1, 1.0)])


@pytest.mark.parametrize("tokens", [6, 80])
def test_any_order_of_warps_and_copies(cuda: ModuleType, order: int, tokens: int) -> None:
    product = Product(cuda, 136, [130], {0: 24, 1: 5}, BF16)
    product.check(randn(tokens, 136, dtype=BF16), [(0, tokens - 2, 0, 0.5), (0, tokens - 2, 1, 0.5)])
