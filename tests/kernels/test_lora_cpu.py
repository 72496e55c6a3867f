"""What the CPU's adapters have beside the others: threads, packed weights, and refusals of what points nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_helpers import randn, same_bits
from linear_cases import F32, Product, lora_weights

from quire.kernels import reference
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, Segment, pack, unpack


def test_close_to_reference(cpu: Any, dtype: torch.dtype) -> None:
    product = Product(cpu, 90, [70, 33, 8, 45], {0: 5, 1: 16, 2: 1}, dtype)
    rows = [(1, 9, 1, 1.0), (9, 10, 0, 1.0), (12, 40, 2, 0.3), (12, 40, 0, 0.7)]
    x = randn(41, 90, dtype=dtype)
    torch.testing.assert_close(product(x, rows, F32), product(x, rows, F32, reference), rtol=1e-4, atol=1e-3)


def test_threads_change_nothing(cpu: Any) -> None:
    product = Product(cpu, 512, [512, 256], {0: 64, 1: 17}, torch.bfloat16)
    x, before = randn(200, 512, dtype=torch.bfloat16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(product(x, [(0, 150, 0, 1.0), (150, 200, 1, 1.0)]))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_how_columns_are_shared_out_changes_nothing(cpu: Any, dtype: torch.dtype) -> None:
    """Threads expand ranges of columns, which their number makes shorter: no element shows where a range ends."""
    product = Product(cpu, 72, [700, 33, 8, 1030], {0: 16, 1: 5, 2: 33, 3: 0}, dtype)
    rows = [(row, row + 1, row % 4, 1.0) for row in range(20)]
    rows += [(20, 33, 0, 0.5), (20, 33, 1, 0.25), (20, 33, 2, -1.0), (34, 40, 3, 1.0)]
    x, before = randn(41, 72, dtype=dtype), torch.get_num_threads()
    wanted = product.check(x, rows)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert same_bits(product(x, rows), wanted), threads
    finally:
        torch.set_num_threads(before)
    for row in range(41):
        own = [(0, 1, slot, weight) for start, end, slot, weight in rows if start <= row < end]
        assert same_bits(product(x[row : row + 1], own), wanted[row : row + 1]), row


def test_segments_of_more_tokens_than_a_cache_holds(cpu: Any, dtype: torch.dtype) -> None:
    """The tokens are cut into parts then, in the middle of segments: no row shows where."""
    product = Product(cpu, 3000, [40, 9], {0: 5, 1: 16}, dtype)
    x = randn(200, 3000, dtype=dtype)
    whole = product(x, [(1, 100, 0, 1.0), (100, 199, 1, 0.5)])
    for first, last, slot, weight in ((1, 20, 0, 1.0), (80, 100, 0, 1.0), (100, 101, 1, 0.5), (160, 199, 1, 0.5)):
        own = product(x[first:last], [(0, last - first, slot, weight)])
        assert same_bits(own, whole[first:last]), (first, last)


def test_packing_turns_back() -> None:
    for columns, rank in [(1, 1), (32, 4), (33, 7), (100, 256)]:
        b = randn(columns, rank, dtype=F32)
        assert torch.equal(unpack(pack(b), columns), b)


def test_what_is_wrong_is_said(cpu: Any) -> None:
    table = LoraTable(16, 40, F32)
    table.put(0, lora_weights(cpu, 4, 16, 40, F32, 1, extras=False, odd=True))
    x, weight = randn(3, 16, dtype=F32), randn(40, 16, dtype=F32)

    def run(rows: list[Segment] | None = None, tables: list[LoraTable | None] | None = None) -> None:
        segments = LoraSegments.of(rows or [(0, 3, 0, 1.0)], 3)
        cpu.linear(x, [weight], [None], None, [table] if tables is None else tables, segments)

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
    good = lora_weights(reference, 4, 16, 40, F32, 1, extras=True, odd=True)
    fields = {name: getattr(good, name) for name in ("a", "b", "scale", "shift")}
    bad = {"a": good.a[:, 1:], "b": good.b.bfloat16(), "scale": good.scale[1:], "shift": good.shift.double()}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            table.put(1, LoraWeights(**{**fields, name: value}))
    with pytest.raises(ValueError, match="a, b: "):
        table.put(1, LoraWeights(good.a, None))
    assert not np.any(table.entries.view("<u8")), "a refused adapter leaves no trace"
