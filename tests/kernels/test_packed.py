"""Packed weights: the bits of their rows, however many tokens, threads and weights a call has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import assert_close, randn, same_bits, strided_rows
from linear_cases import F32, Product, exact_linear, operands

from quire.kernels import native, packed, reference
from quire.layers import Embedding, Linear

BF16 = torch.bfloat16
PACKS = native.packs_rows(BF16)
packs = pytest.mark.skipif(not PACKS, reason="this processor multiplies by rows")
# Each way of a tile, and of several; two chains at a time; a part of the tokens.
TOKENS = (*range(1, 14), 18, 24, 25, 36, 47, 60, 85, 95, 96, 97, 130)


@pytest.fixture
def best() -> Any:
    """The kernels of the instruction set that is in use."""
    return native


def pack(weight: torch.Tensor) -> torch.Tensor:
    assert native.can_pack(weight)
    return native.pack(weight.clone())


@packs
@pytest.mark.parametrize(
    ("features", "rows"),
    [(32, (32,)), (64, (64, 32)), (96, (128,)), (288, (32, 96, 64)), (1024, (160,)), (1056, (96, 32)), (5120, (64,))],
)
def test_the_bits_of_rows(best: Any, features: int, rows: tuple[int, ...]) -> None:
    weights, biases = operands(features, rows, BF16)
    form = [pack(weight) for weight in weights]
    for tokens in TOKENS:
        x = strided_rows(randn(tokens, features, dtype=BF16, seed=tokens))
        for out_dtype in (BF16, F32):
            got, wanted = (best.linear(x, own, biases, out_dtype) for own in (form, weights))
            assert same_bits(got, wanted), (tokens, out_dtype)
        if tokens in (3, 25):
            assert_close(got, *exact_linear(x, weights, biases))
        for row in range(0, tokens, 7):
            assert same_bits(best.linear(x[row : row + 1], form, biases, F32), got[row : row + 1]), (tokens, row)


@packs
def test_more_tokens_than_a_part_has(best: Any) -> None:
    weight, x = randn(64, 4096, dtype=BF16), randn(1500, 4096, dtype=BF16, seed=1)
    assert same_bits(best.linear(x, [pack(weight)], [None]), best.linear(x, [weight], [None]))


@packs
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_beside_rows_and_threads(best: Any, threads: int) -> None:
    """Of one call's weights some are packed; others have rows that are none of a whole group."""
    weights, biases = operands(320, (96, 33, 64, 7), BF16)
    form = [pack(one) if one.shape[0] % packed.GROUP == 0 else one for one in weights]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for tokens in (1, 2, 7, 13, 50, 200):
            x = randn(tokens, 320, dtype=BF16, seed=tokens)
            assert same_bits(best.linear(x, form, biases), best.linear(x, weights, biases))
    finally:
        torch.set_num_threads(before)


@packs
def test_no_number_is_special(best: Any) -> None:
    """Denormals, infinities and NaN: the same comes of them, in the same places."""
    weight, x = randn(64, 256, dtype=BF16), randn(9, 256, dtype=BF16, seed=1)
    weight.view(-1)[::37], x.view(-1)[::29] = 1e-40, -3e-39
    weight[5, 7], weight[6, 8], x[2, 7], x[3, 9] = float("inf"), float("nan"), 0.0, float("-inf")
    got, wanted = (best.linear(x, [own], [None], F32) for own in (pack(weight), weight))
    assert torch.equal(got.isnan(), wanted.isnan()) and got.isnan().any() and got.isinf().any()
    assert same_bits(got.nan_to_num(1.0), wanted.nan_to_num(1.0))


@packs
def test_with_adapters(best: Any) -> None:
    product = Product(best, 96, [64, 96, 32, 32], {0: 5, 1: 16, 2: 1}, BF16)
    mixtures = [
        [(1, 9, 1, 1.0), (9, 10, 0, 1.0), (12, 40, 2, 0.3), (12, 40, 0, 0.7)],
        [(row, row + 1, row % 3, 1.0) for row in range(41)],
    ]
    x = randn(41, 96, dtype=BF16)
    wanted = [product(x, rows) for rows in mixtures]
    product.weights = [pack(weight) for weight in product.weights]
    assert all(same_bits(product(x, rows), own) for rows, own in zip(mixtures, wanted, strict=True))


@packs
def test_close_to_reference(best: Any) -> None:
    weight, x = pack(randn(96, 288, dtype=BF16)), randn(21, 288, dtype=BF16, seed=1)
    expected = reference.linear(x, [weight], [None], F32)
    torch.testing.assert_close(best.linear(x, [weight], [None], F32), expected, rtol=1e-5, atol=1e-4)


@packs
def test_packing_turns_back() -> None:
    for rows, features in ((32, 32), (64, 96), (96, 1024)):
        weight = randn(rows, features, dtype=BF16)
        form = pack(weight)
        assert form.shape == (rows // 32, 16, features // 32, 64) and packed.num_rows(form.shape) == rows
        assert torch.equal(packed.unpack(form), weight)
        for first, end in ((0, rows), (5, 6), (31, rows), (7, 30), (rows, rows)):
            assert torch.equal(packed.unpack(form, first, end), weight[first:end])
        half = packed.slice_rows(form, 32, rows)
        assert torch.equal(packed.unpack(half), weight[32:])


@packs
def test_some_rows_of_a_weight() -> None:
    """The others may have no memory: they are not touched."""
    weight = randn(128, 64, dtype=BF16)
    before = weight.clone()
    form = native.pack(weight, (32, 96))
    assert torch.equal(packed.unpack(form, 32, 96), before[32:96])
    memory = packed.memory(form)
    assert torch.equal(memory[:32], before[:32]) and torch.equal(memory[96:], before[96:])


def test_what_is_not_packed() -> None:
    assert native.can_pack(randn(64, 96, dtype=BF16)) is PACKS
    for shape, dtype in (
        ((64, 96), F32),
        ((64, 96), torch.float16),
        ((63, 96), BF16),
        ((64, 90), BF16),
        ((0, 96), BF16),
    ):
        assert not native.can_pack(randn(*shape, dtype=dtype)), (shape, dtype)
    assert not native.can_pack(randn(64, 96, dtype=BF16).t())
    assert not native.can_pack(randn(2, 64, 96, dtype=BF16))
    assert not native.can_pack(torch.empty(64, 96, dtype=BF16, device="meta"))


@packs
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_table(best: Any, threads: int) -> None:
    """Those of a table in rows, bit by bit: alone, scaled, added to others, and denormals too."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows, features in ((32, 32), (96, 288), (1024, 1056)):
            table = randn(rows, features, dtype=BF16)
            table.view(-1)[::37] = 1e-40
            form, generator = pack(table), torch.Generator().manual_seed(rows)
            for tokens in (0, 1, 5, 130):
                ids = torch.randint(rows, (tokens,), generator=generator)
                for added in (None, randn(tokens, features, dtype=BF16, seed=1)):
                    for scale in (1.0, 1.7):
                        for kernels in (best, reference):
                            got, wanted = (kernels.embedding(ids, one, added, scale) for one in (form, table))
                            assert same_bits(got, wanted)
            assert same_bits(best.embedding(torch.arange(rows), form), table)
    finally:
        torch.set_num_threads(before)


@packs
def test_what_is_wrong_of_a_table_is_said(best: Any) -> None:
    form, ids = pack(randn(64, 96, dtype=BF16)), torch.arange(3)
    for wrong in (form[:, :8], form[..., :32], form[0], form.float(), form[:, :, 1:], form.transpose(0, 2)):
        with pytest.raises((TypeError, ValueError), match="table"):
            best.embedding(ids, wrong)
    for outside in (64, -1):
        with pytest.raises(IndexError, match="ids"):
            best.embedding(torch.tensor([1, outside]), form)
    with pytest.raises(ValueError, match="added"):
        best.embedding(ids, form, randn(3, 95, dtype=BF16))


@packs
def test_an_embedding_tells_its_rows() -> None:
    layer = Embedding(64, 96)
    layer.weight.data = randn(64, 96, dtype=BF16)
    before, ids = layer.weight.data.clone(), torch.tensor([3, 63, 3])
    layer.weight.data = native.pack(layer.weight.data)
    assert torch.equal(layer.rows(3, 50), before[3:50].float())
    assert torch.equal(layer.look_up(ids), before[ids]) and torch.equal(layer(ids), before[ids])


@packs
def test_what_is_wrong_is_said(best: Any) -> None:
    form, x = pack(randn(64, 96, dtype=BF16)), randn(3, 96, dtype=BF16)
    for wrong in (form[:, :8], form[..., :32], form[0], form.float()):
        with pytest.raises((TypeError, ValueError), match="weights"):
            best.linear(x, [wrong], [None])
    with pytest.raises(ValueError, match="weights"):
        best.linear(randn(3, 64, dtype=BF16), [form], [None])
    with pytest.raises(ValueError, match="biases"):
        best.linear(x, [form], [randn(2, dtype=BF16)])


@packs
def test_another_instruction_set_does_not_take_them_for_rows(best: Any) -> None:
    form, x, own = pack(randn(64, 96, dtype=BF16)), randn(3, 96, dtype=BF16), native.isa()
    refused = 0
    try:
        for other in set(native.available_isas()) - {own}:
            native._C.set_isa(other)
            if not native.packs_rows(BF16):
                with pytest.raises(ValueError, match="packed"):
                    best.linear(x, [form], [None])
                with pytest.raises(ValueError, match="packed"):
                    best.embedding(torch.arange(3), form)
                refused += 1
    finally:
        native._C.set_isa(own)
    assert refused


@packs
def test_a_layer_tells_its_rows() -> None:
    layer = Linear(96, 64, bias=False)
    layer.weight.data = randn(64, 96, dtype=BF16)
    before = layer.weight.data.clone()
    layer.weight.data = native.pack(layer.weight.data)
    assert torch.equal(layer.format.rows(layer, 3, 50), before[3:50].float())
    assert layer.format.nbytes(layer) == before.nbytes


@packs
def test_what_cannot_be_packed_is_refused() -> None:
    for wrong in (randn(64, 96, dtype=F32), randn(64, 90, dtype=BF16), randn(32, 64, 96, dtype=BF16)):
        with pytest.raises(ValueError, match="cannot be packed"):
            native.pack(wrong)
    with pytest.raises(ValueError, match="cannot be packed"):
        native.pack(randn(64, 96, dtype=BF16), (3, 64))
