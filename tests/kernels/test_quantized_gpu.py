"""Quantized weights on a GPU, or its emulation: to the bit the products of the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from kernel_helpers import misaligned, randn, same_bits, strided_rows
from quantized_cases import GGML, layouts, random_weight

from quire.kernels import QuantizedWeight, RowKind, RowLayout
from quire.kernels.adapters import LoraSegments
from tests.kernels.linear_cases import Product

F32 = torch.float32
# Those for which a kind's own kernels are made: straight to registers, and through shared memory; and one that has its
# rows unpacked to memory first.
TOKENS = (1, 9, 40, 140)


def operands(features: int, rows: int) -> list[QuantizedWeight]:
    return [random_weight(layout, rows + i % 3, i) for i, layout in enumerate(layouts(features))]


@pytest.mark.parametrize(
    ("features", "tokens"), [*((features, tokens) for features in (30, 256) for tokens in TOKENS), (1312, 2), (2304, 3)]
)
def test_products_are_linears_on_unpacked_weights(cuda: Any, dtype: torch.dtype, features: int, tokens: int) -> None:
    weights = operands(features, 15)
    biases = [randn(len(one), dtype=dtype, seed=i) if i % 2 else None for i, one in enumerate(weights)]
    unpacked = [one.dequantize().to(dtype) for one in weights]
    x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
    for out_dtype in {dtype, F32}:
        got = cuda.quantized_linear(x, weights, biases, out_dtype)
        assert got.dtype is out_dtype and got.isfinite().all()
        assert same_bits(got, cuda.linear(x, unpacked, biases, out_dtype))


@pytest.mark.parametrize("kind", [RowKind.Q4_0, RowKind.Q6_K, RowKind.AFFINE4], ids=lambda kind: kind.name)
def test_larger_weights_and_all_orders_of_blocks(cuda: Any, order: int, kind: RowKind) -> None:
    layout = RowLayout(kind, 768, 64 if kind is RowKind.AFFINE4 else 0)
    weights = [random_weight(layout, rows, rows) for rows in (150, 1, 0, 70, 5, 5, 5, 5, 5, 9)]
    unpacked = [one.dequantize().bfloat16() for one in weights]
    for tokens in (3, 35, 47):
        x = randn(tokens, 768, dtype=torch.bfloat16)
        got = cuda.quantized_linear(x, weights, [None] * len(weights))
        assert same_bits(got, cuda.linear(x, unpacked, [None] * len(weights)))


def test_weights_and_tokens_lie_at_any_address(cuda: Any, dtype: torch.dtype) -> None:
    weights = operands(256, 5)
    odd = []
    for i, one in enumerate(weights):
        memory = torch.zeros(one.data.numel() + 16, dtype=torch.uint8)
        data = memory[1 + i % 15 :][: one.data.numel()].view_as(one.data)
        odd.append(QuantizedWeight(data.copy_(one.data), one.layout, one.aux))
    none = [None] * len(weights)
    for tokens in (2, 40):
        x = randn(tokens, 256, dtype=dtype)
        assert same_bits(cuda.quantized_linear(misaligned(x), odd, none), cuda.quantized_linear(x, weights, none))
    ids = torch.tensor([4, 0, 2])
    for one, same in zip(odd, weights, strict=True):
        assert same_bits(cuda.quantized_embedding(ids, one, dtype), cuda.quantized_embedding(ids, same, dtype))


def test_few_tokens_need_no_memory_for_unpacked_rows(emulated_cuda: Any) -> None:
    count = emulated_cuda._cuda.quantized_workspace
    weight = random_weight(RowLayout(RowKind.Q4_K, 256), 7)
    numbers = (weight.data.data_ptr(), 0, 7, *weight.numbers)
    assert count(47, 256, numbers, 1) == 0
    assert count(48, 256, numbers, 1) == 7 * 256 * 2
    assert count(48, 256, numbers, 0) == 0  # float32 is unpacked by the kernel itself
    uneven = random_weight(RowLayout(RowKind.AFFINE8, 256, 7), 7)
    assert count(1, 256, (uneven.data.data_ptr(), 0, 7, *uneven.numbers), 1) == 7 * 256 * 2
    wide = random_weight(RowLayout(RowKind.Q4_0, 4096), 1)
    assert count(48, 4096, (wide.data.data_ptr(), 0, 1 << 20, *wide.numbers), 1) == 64 << 20  # a part of them at a time


def test_rows_are_looked_up(cuda: Any, dtype: torch.dtype) -> None:
    ids = torch.tensor([4, 0, 4, 2])
    for features in (64, 768):
        added = randn(4, features, dtype=dtype)
        for weight in operands(features, 5):
            wanted = weight.dequantize()[ids]
            assert same_bits(cuda.quantized_embedding(ids, weight, F32), wanted)
            assert same_bits(cuda.quantized_embedding(ids, weight, dtype), wanted.to(dtype))
            got = cuda.quantized_embedding(ids, weight, dtype, added, 3.0)
            assert same_bits(got, (wanted * 3.0 + added.float()).to(dtype))


def test_ids_outside_the_rows_read_as_zeros(cuda: Any) -> None:
    weight = random_weight(RowLayout(RowKind.Q5_K, 512), 3)
    got = cuda.quantized_embedding(torch.tensor([-1, 2, 3]), weight, F32)
    assert same_bits(got[1], weight.dequantize()[2]) and not got[[0, 2]].any()


@pytest.mark.parametrize("kind", GGML, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
def test_any_bytes_are_what_the_gguf_package_makes_of_them(cuda: Any, kind: RowKind) -> None:
    layout = RowLayout(kind, 512)
    generator = torch.Generator().manual_seed(int(kind))
    data = torch.randint(0, 256, (40, layout.row_bytes), dtype=torch.uint8, generator=generator)
    wanted = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType(int(kind))).copy())
    got = cuda.quantized_embedding(torch.arange(40), QuantizedWeight(data, layout), F32)
    none = wanted.isnan() & got.isnan()
    assert same_bits(got.masked_fill(none, 0), wanted.masked_fill(none, 0))


def test_adapters_are_added_on_top(cuda: Any, dtype: torch.dtype) -> None:
    chosen = operands(256, 40)[:6]
    product = Product(cuda, 256, [len(one) for one in chosen], {0: 8, 1: 3}, dtype)
    unpacked = [one.dequantize().to(dtype) for one in chosen]
    rows = [(2, 5, 0, 1.0), (5, 9, 1, 0.5), (5, 9, 0, 2.0)]
    x = randn(12, 256, dtype=dtype)
    for out_dtype in {dtype, F32}:
        with_adapters = (x, product.biases, out_dtype, product.tables, LoraSegments.of(rows, len(x)))
        got, wanted = (
            call(with_adapters[0], weights, *with_adapters[1:])
            for call, weights in ((cuda.quantized_linear, chosen), (cuda.linear, unpacked))
        )
        assert same_bits(got, wanted)
        assert not same_bits(got, cuda.quantized_linear(x, chosen, product.biases, out_dtype))
