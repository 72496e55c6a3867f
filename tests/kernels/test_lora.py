"""`lora` against float64 over ranks, shapes and segments, and its promise: a row depends on its own adapter alone."""

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


def tables_of(features: int, widths: list[int], ranks: list[int], dtype: torch.dtype) -> list[LoraTable | int]:
    """A table with an adapter of each rank for each width; every third layer has none, every second adapter extras."""
    tables: list[LoraTable | int] = []
    for layer, columns in enumerate(widths):
        if layer % 3 == 2:
            tables.append(columns)
            continue
        table = LoraTable(features, columns, dtype, slots=2)
        for slot, rank in enumerate(ranks):
            table.put(slot, weights(rank, features, columns, dtype, 10 * slot + layer, extras=slot % 2 == 1))
        tables.append(table)
    return tables


def exact(
    x: torch.Tensor, y: torch.Tensor, tables: list[LoraTable | int], rows: list[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 result, and a bound on what float32 sums (and roundings of y in between) may lose."""
    out, error = y.double().clone(), torch.zeros_like(y, dtype=torch.float64)
    for start, end, slot, weight in rows:
        first = 0
        for table in tables:
            columns = table if isinstance(table, int) else table.out_features
            own = None if isinstance(table, int) else table.get(slot)
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
        (256, [64, 16, 16], [64, 1]), (40, [700], [256, 2]), (8, [1030, 3], [7, 1]),
    ],
)  # fmt: skip
def test_close_to_float64(isa: str, dtype: torch.dtype, features: int, widths: list[int], ranks: list[int]) -> None:
    tables = tables_of(features, widths, ranks, dtype)
    for tokens in (1, 2, 7, 30, 61):
        middle, last = tokens // 3, len(ranks) - 1
        rows = [(0, middle, 0, 1.0), (middle, tokens - 1, last, 0.5), (middle, tokens - 1, 0, -2.0)]
        x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
        for out_dtype in {dtype, F32}:
            y = misaligned(randn(tokens, sum(widths), dtype=out_dtype, seed=1))
            before = y.clone()
            wanted, error = exact(x, y, tables, rows)
            native.lora(x, y, tables, LoraSegments.of(rows))
            assert_close(y, wanted, error)
            assert same_bits(y[tokens - 1 :], before[tokens - 1 :])  # no adapter's row


def test_close_to_reference(isa: str, dtype: torch.dtype) -> None:
    tables = tables_of(90, [70, 33, 8, 45], [5, 16, 1], dtype)
    rows = [(1, 9, 1, 1.0), (9, 10, 0, 1.0), (12, 40, 2, 0.3), (12, 40, 0, 0.7)]
    x, y = randn(41, 90, dtype=dtype), randn(41, 156, dtype=F32)
    other = y.clone()
    native.lora(x, y, tables, LoraSegments.of(rows))
    reference.lora(x, other, tables, LoraSegments.of(rows))
    torch.testing.assert_close(y, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_a_row_does_not_depend_on_its_company(isa: str, dtype: torch.dtype, kernel: str) -> None:
    run = native.lora if kernel == "native" else reference.lora
    tables = tables_of(77, [130, 45], [5, 64, 1, 33], dtype)
    rows = [(0, 20, 0, 1.0), (22, 23, 1, 1.0), (23, 53, 2, 0.5), (23, 53, 3, 0.5), (53, 60, 1, 1.0)]
    x, y = randn(60, 77, dtype=dtype), randn(60, 175, dtype=dtype, seed=2)
    together = y.clone()
    run(x, together, tables, LoraSegments.of(rows))
    for start, end in [(0, 1), (3, 8), (19, 24), (22, 23), (30, 31), (24, 60), (0, 59)]:
        own = [(max(s, start) - start, min(e, end) - start, slot, w) for s, e, slot, w in rows if s < end and start < e]
        alone = y[start:end].clone()
        run(x[start:end], alone, tables, LoraSegments.of(own))
        assert same_bits(alone, together[start:end])


def test_threads_change_nothing(isa: str) -> None:
    tables = tables_of(512, [512, 256], [64, 17], torch.bfloat16)
    x, y = randn(200, 512, dtype=torch.bfloat16), randn(200, 768, dtype=torch.bfloat16, seed=1)
    rows, results, before = [(0, 150, 0, 1.0), (150, 200, 1, 1.0)], [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(y.clone())
            native.lora(x, results[-1], tables, LoraSegments.of(rows))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_a_slot_is_emptied_and_filled_again() -> None:
    table = LoraTable(16, 40, F32, slots=1)
    x = randn(3, 16, dtype=F32)

    def run(slot: int) -> torch.Tensor:
        y = torch.zeros(3, 40)
        native.lora(x, y, [table], LoraSegments.of([(0, 3, slot, 1.0)]))
        return y

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
    x, y = randn(3, 16, dtype=F32), torch.zeros(3, 40)

    def run(rows: list[Segment] | None = None, **change: object) -> None:
        arguments = {"x": x, "y": y, "tables": [table], "segments": LoraSegments.of(rows or [(0, 3, 0, 1.0)])}
        native.lora(**{**arguments, **change})

    run()
    with pytest.raises(IndexError, match=r"segments: .*rows"):
        run([(0, 4, 0, 1.0)])
    with pytest.raises(IndexError, match=r"segments: .*rows"):
        run([(-1, 3, 0, 1.0)])
    with pytest.raises(IndexError, match=r"segments: .*slot"):
        run([(0, 3, 8, 1.0)])
    with pytest.raises(ValueError, match=r"tables: .*17"):
        run(x=randn(3, 17, dtype=F32))
    with pytest.raises(ValueError, match=r"y: "):
        run(y=torch.zeros(3, 41))
    with pytest.raises(TypeError, match=r"y: .*float16"):
        run(y=torch.zeros(3, 40, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"rows: .*at most 1"):
        LoraSegments(1).fill([(0, 1, 0, 1.0)] * 2)
    good = weights(4, 16, 40, F32, 1, extras=True)
    fields = {name: getattr(good, name) for name in ("a", "b", "scale", "shift")}
    bad = {"a": good.a[:, 1:], "b": good.b.bfloat16(), "scale": good.scale[1:], "shift": good.shift.double()}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            table.put(1, LoraWeights(**{**fields, name: value}))
    with pytest.raises(ValueError, match="a, b: "):
        table.put(1, LoraWeights(good.a, None))
    assert not np.any(table.entries[1:].view("<u8")), "a refused adapter leaves no trace"
