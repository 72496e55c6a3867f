"""Quantized weights: what their bytes mean, and products with them, of every kind on every back end of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kernel_helpers import ROUNDING, assert_close, randn, same_bits, strided_rows
from quantized_cases import ELEMENTS, GGML, INTEGER, extreme_weight, layouts, random_weight

from quire.kernels import QuantizedWeight, RowKind, RowLayout, quantize_rows, reference
from quire.kernels.adapters import LoraSegments
from quire.kernels.reference_quantized import is_integer, quantized_groups, quantized_rows
from tests.kernels.back_ends import CPU, back_end
from tests.kernels.linear_cases import Product

pytestmark = pytest.mark.usefixtures("one_thread")
F32 = torch.float32
TOKENS = (0, 1, 2, 3, 5, 8, 13, 40)


@pytest.fixture(params=["reference", *CPU])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every back end that has kernels for quantized weights."""
    with back_end(request.param) as module:
        yield module


def same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit by bit, but for NaN, which may have any."""
    both = got.isnan() & wanted.isnan()
    return got.shape == wanted.shape and same_bits(got.masked_fill(both, 0), wanted.masked_fill(both, 0))


def hostile_bytes(layout: RowLayout, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(layout.kind))
    data = torch.randint(0, 256, (rows, layout.row_bytes), dtype=torch.uint8, generator=generator)
    # Denormal, infinite, zero and negative scales, wherever a kind has its scales.
    for i, (low, high) in enumerate([(1, 0), (0, 0x7C), (0, 0xFC), (0, 0), (0, 0x80), (0xFF, 0x7B), (0xFF, 0x83)]):
        data[2 * i, ::2], data[2 * i, 1::2] = low, high
        data[2 * i + 1, : layout.row_bytes // 2] = 0xFF if i % 2 else 0
    return data


@pytest.mark.parametrize("kind", GGML, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
def test_ggml_rows_are_the_gguf_packages_bit_for_bit(kind: RowKind) -> None:
    layout = RowLayout(kind, 768)
    data = hostile_bytes(layout, 64)
    wanted = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType(int(kind))).copy())
    weight = QuantizedWeight(data, layout)
    assert same_numbers(weight.dequantize(), wanted)
    assert same_numbers(weight.dequantize(3, 9), wanted[3:9])
    ids = torch.arange(63, -1, -1)
    for isa in CPU:
        with back_end(isa) as native:
            assert same_numbers(native.quantized_embedding(ids, weight, F32), wanted.flip(0)), isa


@pytest.mark.parametrize("features", [64, 768])
def test_rows_of_every_layout_are_unpacked_alike(features: int) -> None:
    ids = torch.tensor([4, 0, 4, 2])
    for layout in layouts(features):
        weight = random_weight(layout, 5)
        wanted = weight.dequantize()[ids]
        assert wanted.isfinite().all() and 0.0005 < wanted.std() < 5
        added = randn(4, features, dtype=torch.bfloat16)
        for isa in ("reference", *CPU):
            with back_end(isa) as kernels:
                assert same_bits(kernels.quantized_embedding(ids, weight, F32), wanted)
                got = kernels.quantized_embedding(ids, weight, torch.bfloat16, added, 3.0)
                assert same_bits(got, (wanted * 3.0 + added.float()).bfloat16())


def test_affine_and_table_rows_mean_what_they_say() -> None:
    codes = torch.randint(0, 16, (3, 10))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scales, zeros = torch.rand(3, 3), torch.randint(0, 16, (3, 3)).float()
    group = torch.arange(10) // 4

    def weight(
        kind: RowKind, parts: list[torch.Tensor], aux: torch.Tensor | None = None, **layout: Any
    ) -> torch.Tensor:
        own = RowLayout(kind, 10, 4, **layout)
        data = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        data = torch.nn.functional.pad(data, (0, own.row_bytes - data.shape[1]))
        return QuantizedWeight(data, own, aux).dequantize()

    affine = (codes - zeros[:, group]) * scales[:, group]
    assert torch.equal(weight(RowKind.AFFINE4, [scales, zeros, packed], zeros=True), affine)
    assert torch.equal(weight(RowKind.AFFINE4, [scales, packed]), (codes - 8.0) * scales[:, group])
    bytes_ = codes.to(torch.uint8)
    assert torch.equal(weight(RowKind.AFFINE8, [scales, bytes_]), (codes - 128.0) * scales[:, group])
    order = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0, 1, 0], dtype=torch.int32)
    assert torch.equal(
        weight(RowKind.AFFINE4, [scales, zeros, packed], order, zeros=True),
        (codes - zeros[:, order.long()]) * scales[:, order.long()],
    )
    table = torch.randn(16)
    assert torch.equal(weight(RowKind.TABLE4, [scales, packed], table), table[codes] * scales[:, group])


@pytest.mark.parametrize("kind", [RowKind.Q8_0, RowKind.Q4_0], ids=["q8_0", "q4_0"])
def test_quantized_rows_are_near(kind: RowKind) -> None:
    x = randn(50, 96, dtype=F32)
    x[3], x[4, :40], x[5] = 0, 1e-30, 2.0
    data = quantize_rows(x, kind)
    back = QuantizedWeight(data, RowLayout(kind, 96)).dequantize()
    step = x.view(50, 3, 32).abs().amax(2, keepdim=True) / (127 if kind is RowKind.Q8_0 else 7)
    most = 0.51 if kind is RowKind.Q8_0 else 1.3  # the largest of 15 may be cut off
    assert ((back - x).view(50, 3, 32).abs() <= step * most + 1e-7).all()
    assert torch.equal(back[3], x[3])
    gguf_error = x - torch.from_numpy(
        gguf.quants.dequantize(
            gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType(int(kind))), gguf.GGMLQuantizationType(int(kind))
        )
    )
    assert (back - x).square().sum() <= gguf_error.square().sum() * 1.001
    assert torch.equal(data[7], quantize_rows(x[7:8], kind)[0])


def operands(features: int, rows: int, seed: int = 0) -> list[QuantizedWeight]:
    return [random_weight(layout, rows + i % 3, seed + i) for i, layout in enumerate(layouts(features))]


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """Of every five tokens one as it is, three with one large column each, at places of their own, one with many."""
    x = x.clone()
    for token, row in enumerate(x):
        if token % 5 == 4:
            row[::33] *= 20
        elif token % 5:
            row[token * 37 % len(row)] = 30.0
    return x


def exact_product(x: torch.Tensor, weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """x in int8 where the kind says so, times the weight in float64, and a bound on what float32 sums may lose."""
    kind, features = weight.layout.kind, x.shape[1]
    rows = weight.dequantize()
    if is_integer(kind):
        own, rows = (quantized_rows if kind is RowKind.INT8_ROWS else quantized_groups)(x), rows.double()
    else:
        own, rows = x.double(), rows.to(x.dtype).double()
    size = own.abs() @ rows.abs().T
    if kind in (RowKind.Q4_1, RowKind.Q5_1, RowKind.Q2_K, RowKind.Q4_K, RowKind.Q5_K):
        size = size * 4  # a minimum and the rest may nearly cancel out
    return own @ rows.T, size * (features / 8 + 8) * ROUNDING[F32]


@pytest.mark.parametrize("features", [64, 512])
def test_products_are_close_to_float64(kernels: Any, dtype: torch.dtype, features: int) -> None:
    weights = operands(features, 6)
    biases = [randn(len(one), dtype=dtype, seed=i) if i % 2 else None for i, one in enumerate(weights)]
    for tokens in (0, 1, 3, 17):
        x = strided_rows(with_outliers(randn(tokens, features, dtype=dtype, seed=tokens)))
        parts = [exact_product(x, one) for one in weights]
        exact = torch.cat([y if b is None else y + b.double() for (y, _), b in zip(parts, biases, strict=True)], 1)
        for out_dtype in {dtype, F32}:
            got = kernels.quantized_linear(x, weights, biases, out_dtype)
            assert got.dtype is out_dtype and got.is_contiguous()
            assert_close(got, exact, torch.cat([error for _, error in parts], 1) + exact.abs() * ROUNDING[F32] * 4)


def test_a_group_with_outliers_is_as_exact_as_its_other_columns_need() -> None:
    """One large column would leave the others of its group few steps: 1.0 of a scale of 100 / 127."""
    x = randn(3, 1024, dtype=F32)
    x[1, 5], x[2, ::32] = 100.0, 100.0
    weight = QuantizedWeight(
        quantize_rows(randn(64, 1024, dtype=F32, seed=1), RowKind.Q8_0), RowLayout(RowKind.Q8_0, 1024)
    )
    exact = x.double() @ weight.dequantize().double().T
    for isa in ("reference", *CPU):
        with back_end(isa) as kernels:
            error = (kernels.quantized_linear(x, [weight], [None]).double() - exact).square().mean(1).sqrt()
        assert error[1] < error[0] * 1.5, isa  # by single codes it is 7 times as large
        assert error[2] < error[0] * 70, isa  # all groups are alike here: none has outliers


def test_float_rows_are_linears_on_unpacked_weights(kernels: Any, dtype: torch.dtype) -> None:
    for features in (30, 256):
        weights = [one for one in operands(features, 40) if not is_integer(one.layout.kind)]
        biases = [randn(len(one), dtype=dtype, seed=i) if i % 2 else None for i, one in enumerate(weights)]
        unpacked = [one.dequantize().to(dtype) for one in weights]
        for tokens in (1, 4, 30, 130):
            x = strided_rows(randn(tokens, features, dtype=dtype, seed=tokens))
            for out_dtype in {dtype, F32}:
                got = kernels.quantized_linear(x, weights, biases, out_dtype)
                assert same_bits(got, kernels.linear(x, unpacked, biases, out_dtype))


@pytest.mark.parametrize("features", [256, 544, 1280])
def test_an_element_depends_on_its_token_and_row_alone(kernels: Any, features: int) -> None:
    weights = operands(features, 21)
    biases = [randn(len(one), dtype=torch.bfloat16, seed=i) if i % 2 else None for i, one in enumerate(weights)]
    x = with_outliers(randn(max(TOKENS), features, dtype=torch.bfloat16))
    whole = kernels.quantized_linear(x, weights, biases)
    for tokens in TOKENS:
        assert same_bits(kernels.quantized_linear(x[:tokens], weights, biases), whole[:tokens])
    column = 0
    for weight, bias in zip(weights, biases, strict=True):
        first, column = column, column + len(weight)
        assert same_bits(kernels.quantized_linear(x[7:8], [weight], [bias]), whole[7:8, first:column])
        for tokens in range(2, 10):  # alone, as a kind beside it has a say in how a call is computed
            assert same_bits(kernels.quantized_linear(x[:tokens], [weight], [bias]), whole[:tokens, first:column])
        some = QuantizedWeight(weight.data[5:6], weight.layout, weight.aux)
        own = None if bias is None else bias[5:6]
        assert same_bits(kernels.quantized_linear(x, [some], [own]), whole[:, first + 5 : first + 6])


@pytest.mark.parametrize("kind", INTEGER, ids=lambda kind: kind.name)
def test_instruction_sets_agree_to_the_last_bit(kind: RowKind, dtype: torch.dtype) -> None:
    for features in (256, 1536):
        weight = random_weight(RowLayout(kind, features), 37)
        x = with_outliers(randn(19, features, dtype=dtype))
        found = {}
        for isa in CPU:
            with back_end(isa) as native:
                found[isa] = native.quantized_linear(x, [weight], [None], F32)
        fused = [y for isa, y in found.items() if isa != "portable"]  # which has no fused multiply-add
        assert all(same_bits(y, fused[0]) for y in fused)


@pytest.mark.parametrize("kind", INTEGER, ids=lambda kind: kind.name)
def test_the_largest_codes_do_not_overflow(kind: RowKind) -> None:
    features = 512
    weight = extreme_weight(RowLayout(kind, features), 24)
    signs = torch.ones(features)
    signs[1::3] = -1
    outliers = torch.zeros(features)  # whose second codes are the largest, too
    outliers[:32] = 100.4999 / 127 * signs[:32]
    outliers[7] = 1
    x = torch.stack([signs.abs(), -signs.abs(), signs, -signs, outliers, -outliers]).repeat(4, 1)
    wanted = reference.quantized_linear(x, [weight], [None], F32)
    most = x.abs() @ weight.dequantize().abs().T
    for isa in CPU:
        with back_end(isa) as native:
            for tokens in (1, 3, 5, 6, 24):
                got = native.quantized_linear(x[-tokens:], [weight], [None], F32)
                assert ((got - wanted[-tokens:]).abs() <= 1e-6 * most[-tokens:]).all(), (isa, tokens)


def test_mixed_lists_are_their_parts_side_by_side(kernels: Any, dtype: torch.dtype) -> None:
    weights = [random_weight(RowLayout(kind, 512), 9 + i) for i, kind in enumerate(
        (RowKind.Q4_K, RowKind.Q4_K, RowKind.Q6_K, RowKind.F16, RowKind.INT8_ROWS, RowKind.AFFINE4, RowKind.BF16,
         RowKind.Q8_0)
    )]  # fmt: skip
    x = randn(11, 512, dtype=dtype)
    parts = [kernels.quantized_linear(x, [one], [None]) for one in weights]
    assert same_bits(kernels.quantized_linear(x, weights, [None] * len(weights)), torch.cat(parts, 1))


@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
def test_adapters_are_added_on_top(kernels: Any, dtype: torch.dtype, integer: bool) -> None:
    chosen = [one for one in operands(256, 40) if is_integer(one.layout.kind) is integer][:6]
    product = Product(kernels, 256, [len(one) for one in chosen], {0: 8, 1: 3}, dtype)
    rows = [(2, 5, 0, 1.0), (5, 9, 1, 0.5), (5, 9, 0, 2.0)]
    x = randn(12, 256, dtype=dtype)
    for out_dtype in {dtype, F32}:
        base = kernels.quantized_linear(x, chosen, product.biases, out_dtype)
        tables, segments = product.tables, LoraSegments.of(rows, len(x))
        got = kernels.quantized_linear(x, chosen, product.biases, out_dtype, tables, segments)
        assert_close(got, *product.exact(x, base, rows))
        for row in (0, 1, 9, 11):
            assert same_bits(got[row], base[row])
        alone = LoraSegments.of([(0, 3, 0, 1.0)], 3)
        own = kernels.quantized_linear(x[2:5], chosen, product.biases, out_dtype, tables, alone)
        assert same_bits(own, got[2:5])


def test_what_is_no_number_stays_none(kernels: Any) -> None:
    for kind in (RowKind.Q8_0, RowKind.Q4_K, RowKind.INT8_ROWS):
        weight = random_weight(RowLayout(kind, 512), 8)
        x = randn(6, 512, dtype=F32)
        whole = kernels.quantized_linear(x, [weight], [None])
        x[1, 100], x[2, 7], x[3, 511] = torch.nan, torch.inf, -torch.inf
        got = kernels.quantized_linear(x, [weight], [None])
        assert not got[1:4].isfinite().any()
        assert same_bits(got[[0, 4, 5]], whole[[0, 4, 5]])
        x = torch.zeros(2, 512)
        x[1] = 1e-42
        assert kernels.quantized_linear(x, [weight], [None]).abs().max() < 1e-38


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowLayout(RowKind.Q4_K, 128), "features: Q4_K rows have a multiple of 256 columns, got 128"),
        (lambda: RowLayout(RowKind.AFFINE4, 3), "features: .*multiple of 2"),
        (lambda: RowLayout(RowKind.INT8_ROWS, 2**17 + 1), "features: .*at most 131072"),
        (lambda: RowLayout(RowKind.Q8_0, 32, 32), "group: expected 0 for Q8_0, got 32"),
        (lambda: RowLayout(RowKind.AFFINE8, 32, 33), "group: expected 32 at most, a row's columns, got 33"),
        (lambda: RowLayout(RowKind.AFFINE4, 32, 2**63 - 1), "group: expected 32 at most"),
        (lambda: RowLayout(RowKind.TABLE4, 32, zeros=True), "zeros: "),
        (lambda: random_weight(RowLayout(RowKind.Q8_0, 32), 2, 0) and QuantizedWeight(
            torch.zeros(2, 34, dtype=torch.uint8), RowLayout(RowKind.Q8_0, 32), torch.zeros(16)), "aux: .*have none"),
        (lambda: QuantizedWeight(torch.zeros(2, 20, dtype=torch.uint8), RowLayout(RowKind.TABLE4, 32)), "aux: .*16"),
        (lambda: QuantizedWeight(torch.zeros(2, 24, dtype=torch.uint8), RowLayout(RowKind.AFFINE4, 32, 16),
                                 torch.full((32,), 2, dtype=torch.int32)), "aux: .*0 to 1"),
        (lambda: quantize_rows(torch.zeros(2, 256), RowKind.Q4_K), "kind: expected Q8_0, Q4_0 or Q4_1, got Q4_K"),
        (lambda: quantize_rows(torch.zeros(2, 40), RowKind.Q8_0), "features: .*32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_the_reference_is_near_the_compiled_kernels() -> None:
    for weight in operands(512, 9):
        x = randn(5, 512, dtype=torch.bfloat16)
        exact, error = exact_product(x, weight)
        assert_close(reference.quantized_linear(x, [weight], [None], F32), exact, error)


def test_elements_are_numpys() -> None:
    """The cases themselves: what is written as float16 is what numpy reads."""
    weight = random_weight(RowLayout(RowKind.F16, 64), 3)
    assert np.array_equal(weight.data.numpy().view(np.float16).astype(np.float32), weight.dequantize().numpy())
    assert len(ELEMENTS) == 3
