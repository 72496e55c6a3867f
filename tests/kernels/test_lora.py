"""What adapters add to `linear`, against float64; and the promise: a row depends on its own adapter alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_helpers import ROUNDING, assert_close, misaligned, randn, same_bits, strided_rows

from quire.kernels import reference
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, Segment, pack, unpack

native = pytest.importorskip("quire.kernels.native")
F32 = torch.float32


def weights(rank: int, features: int, columns: int, dtype: torch.dtype, seed: int, extras: bool) -> LoraWeights:
    a = misaligned(randn(rank, features, dtype=dtype, seed=seed)) if rank else None
    b = misaligned(pack(randn(columns, rank, dtype=dtype, seed=seed + 1))) if rank else None
    scale = misaligned(randn(columns, dtype=F32, seed=seed + 2)) if extras else None
    shift = misaligned(randn(columns, dtype=F32, seed=seed + 3)) if extras or not rank else None
    return LoraWeights(a, b, 0.25 + seed % 3, scale, shift)


class Product:
    """A call of `linear` with adapters: weights of some widths, of which every third has no table."""

    def __init__(self, features: int, widths: list[int], ranks: list[int], dtype: torch.dtype) -> None:
        self.weights = [randn(n, features, dtype=dtype, seed=n) for n in widths]
        self.biases = [randn(n, dtype=dtype, seed=n) if i % 2 else None for i, n in enumerate(widths)]
        self.tables: list[LoraTable | None] = []
        for layer, columns in enumerate(widths):
            table = LoraTable(features, columns, dtype, slots=2) if layer % 3 != 2 else None
            for slot, rank in enumerate(ranks if table is not None else ()):
                table.put(slot, weights(rank, features, columns, dtype, 10 * slot + layer, extras=slot % 2 == 1))
            self.tables.append(table)

    def __call__(
        self, x: torch.Tensor, rows: list[Segment] | None, out_dtype: torch.dtype | None = None, kernels=native
    ) -> torch.Tensor:
        if rows is None:
            return kernels.linear(x, self.weights, self.biases, out_dtype)
        return kernels.linear(x, self.weights, self.biases, out_dtype, self.tables, LoraSegments.of(rows, len(x)))

    def exact(self, x: torch.Tensor, y: torch.Tensor, rows: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """What becomes of y in float64, and a bound on what float32 sums (and roundings of y in between) may lose."""
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
                    wide, a, b = x[start:end].double(), own.a.double(), unpack(own.b, columns).double()
                    part += wide @ a.T @ b.T * own.scaling * weight
                    size = wide.abs() @ a.abs().T @ b.abs().T * abs(own.scaling * weight)
                    bound += size * (x.shape[1] / 8 + own.rank + 16) * ROUNDING[F32]
                if own.scale is not None:
                    part *= own.scale.double()
                    bound *= own.scale.double().abs()
                if own.shift is not None:
                    bound += (part.abs() + own.shift.double().abs()) * ROUNDING[F32] * 4
                    part += own.shift.double()
                bound += (part.abs() + bound) * ROUNDING[y.dtype] * 2
        return out, error


@pytest.mark.parametrize(
    ("features", "widths", "ranks"),
    [
        (1, [1], [1]), (16, [31], [4, 1]), (33, [32, 5, 64], [3, 0, 8]), (100, [65], [16, 33, 5]),
        (256, [64, 16, 16], [64, 1]), (40, [700], [256, 2]), (8, [1030, 3], [7, 1]), (2000, [130], [40, 3]),
    ],
)  # fmt: skip
def test_close_to_float64(isa: str, dtype: torch.dtype, features: int, widths: list[int], ranks: list[int]) -> None:
    product = Product(features, widths, ranks, dtype)
    for tokens in (1, 2, 7, 30, 61, 130):
        middle, last = tokens // 3, len(ranks) - 1
        rows = [(0, middle, 0, 1.0), (middle, tokens - 1, last, 0.5), (middle, tokens - 1, 0, -2.0)]
        x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
        for out_dtype in {dtype, F32}:
            base = product(x, None, out_dtype)
            wanted, error = product.exact(x, base, rows)
            got = product(x, rows, out_dtype)
            assert_close(got, wanted, error)
            assert same_bits(got[tokens - 1 :], base[tokens - 1 :])  # no adapter's row


def test_close_to_reference(isa: str, dtype: torch.dtype) -> None:
    product = Product(90, [70, 33, 8, 45], [5, 16, 1], dtype)
    rows = [(1, 9, 1, 1.0), (9, 10, 0, 1.0), (12, 40, 2, 0.3), (12, 40, 0, 0.7)]
    x = randn(41, 90, dtype=dtype)
    torch.testing.assert_close(product(x, rows, F32), product(x, rows, F32, reference), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_a_row_does_not_depend_on_its_company(isa: str, dtype: torch.dtype, kernels) -> None:
    product = Product(77, [130, 45], [5, 64, 1, 33], dtype)
    rows = [(0, 20, 0, 1.0), (22, 23, 1, 1.0), (23, 53, 2, 0.5), (23, 53, 3, 0.5), (53, 59, 1, 1.0)]
    x = randn(60, 77, dtype=dtype)
    base, together = product(x, None, kernels=kernels), product(x, rows, kernels=kernels)
    for start, end in [(0, 1), (3, 8), (19, 24), (22, 23), (30, 31), (24, 60), (0, 59)]:
        own = [(max(s, start) - start, min(e, end) - start, slot, w) for s, e, slot, w in rows if s < end and start < e]
        assert same_bits(product(x[start:end], own, kernels=kernels), together[start:end])
    for row in (20, 21, 59):
        assert same_bits(together[row], base[row])


def test_threads_change_nothing(isa: str) -> None:
    product = Product(512, [512, 256], [64, 17], torch.bfloat16)
    x, before = randn(200, 512, dtype=torch.bfloat16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(product(x, [(0, 150, 0, 1.0), (150, 200, 1, 1.0)]))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_a_slot_is_emptied_and_filled_again() -> None:
    table, weight, x = LoraTable(16, 40, F32, slots=1), torch.zeros(40, 16), randn(3, 16, dtype=F32)

    def run(slot: int) -> torch.Tensor:
        return native.linear(x, [weight], [None], None, [table], LoraSegments.of([(0, 3, slot, 1.0)], 3))

    assert not table.put(0, weights(4, 16, 40, F32, 1, extras=False))
    first = run(0)
    assert first.abs().sum() > 0
    assert table.put(5, weights(2, 16, 40, F32, 2, extras=True)), "the table has moved"
    assert same_bits(run(0), first) and not same_bits(run(5), first)
    table.drop(0)
    table.drop(0)
    assert torch.equal(run(0), torch.zeros(3, 40)) and len(table) == 1


def test_packing_turns_back() -> None:
    for columns, rank in [(1, 1), (32, 4), (33, 7), (100, 256)]:
        b = randn(columns, rank, dtype=F32)
        assert torch.equal(unpack(pack(b), columns), b)


def test_what_is_wrong_is_said() -> None:
    table = LoraTable(16, 40, F32)
    table.put(0, weights(4, 16, 40, F32, 1, extras=False))
    x, weight = randn(3, 16, dtype=F32), randn(40, 16, dtype=F32)

    def run(rows: list[Segment] | None = None, tables: list[LoraTable | None] | None = None) -> None:
        segments = LoraSegments.of(rows or [(0, 3, 0, 1.0)], 3)
        native.linear(x, [weight], [None], None, [table] if tables is None else tables, segments)

    run()
    run([(0, 2, 0, 0.5), (0, 2, 1, 0.5), (2, 3, 0, 1.0)])
    for rows in ([(0, 4, 0, 1.0)], [(-1, 3, 0, 1.0)]):
        with pytest.raises(IndexError, match=r"segments: .*rows"):
            run(rows)
    for slot in (8, -1):
        with pytest.raises(IndexError, match=r"segments: .*slot"):
            run([(0, 3, slot, 1.0)])
    for rows in ([(0, 2, 0, 1.0), (1, 3, 0, 1.0)], [(2, 3, 0, 1.0), (0, 1, 0, 1.0)]):
        with pytest.raises(ValueError, match=r"segments: .*ordered"):
            run(rows)
    with pytest.raises(ValueError, match=r"tables: .*1 weights, got 0"):
        run(tables=[])
    for wrong in (LoraTable(17, 40, F32), LoraTable(16, 41, F32), LoraTable(16, 40, torch.bfloat16)):
        with pytest.raises(ValueError, match=r"tables: .*40, 16"):
            run(tables=[wrong])
    with pytest.raises(ValueError, match=r"rows: .*at most 1"):
        LoraSegments(1, 1).fill([(0, 1, 0, 1.0)] * 2)


def test_a_table_takes_what_fits() -> None:
    table = LoraTable(16, 40, F32)
    good = weights(4, 16, 40, F32, 1, extras=True)
    fields = {name: getattr(good, name) for name in ("a", "b", "scale", "shift")}
    bad = {"a": good.a[:, 1:], "b": good.b.bfloat16(), "scale": good.scale[1:], "shift": good.shift.double()}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            table.put(1, LoraWeights(**{**fields, name: value}))
    with pytest.raises(ValueError, match="a, b: "):
        table.put(1, LoraWeights(good.a, None))
    assert not np.any(table.entries.view("<u8")), "a refused adapter leaves no trace"
