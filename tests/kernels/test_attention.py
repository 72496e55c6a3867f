"""Paged attention against float64, and its promise: a token's bits do not depend on its company."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import HALVES, HEAD_DIMS, TOLERANCE, Heads, check, exact, page, rounds_weights, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import is_gpu, same_bits

from quire.kernels import reference

DTYPES = [torch.float32, *HALVES]
HEADS = [(1, 1), (4, 4), (8, 1), (6, 2), (16, 8), (14, 2), (12, 4)]


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """The oracle's small products are slower on many threads; the kernel's threads have tests of their own."""


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_mix_matches_float64(quick: Any, data: st.DataObject) -> None:
    heads, dim = data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(HEAD_DIMS))
    dtype, block_size = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 4, 8, 16, 32]))
    seed = data.draw(st.integers(0, 2**31))
    chunks = []
    for i in range(data.draw(st.integers(1, 6))):
        own, past = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 230))
        chunks.append((stream(past + own, heads, dim, dtype, seed + i), past, past + own))
    check(quick, chunks, block_size)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("heads", "spans"),
    [((6, 2), [(0, 1), (40, 41), (0, 67), (100, 131)]), ((2, 1), [(66, 67), (0, 66), (0, 1), (80, 82)])],
)
def test_every_head_size_matches_float64_and_reference(
    kernels: Any, heads: Heads, spans: list[tuple[int, int]], dim: int, dtype: torch.dtype
) -> None:
    chunks = [(stream(end, heads, dim, dtype, seed=end), start, end) for start, end in spans]
    check(kernels, chunks, 8)
    call = page(chunks)
    wanted, got = call.run(reference), call.run(kernels)
    roundings = 6 if rounds_weights(kernels, dtype) else 3
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=roundings * TOLERANCE[dtype])


def test_long_contexts_of_several_spans(quick: Any, dtype: torch.dtype) -> None:
    long = stream(1700, (4, 2), 32, dtype)
    check(quick, [(long, 1699, 1700)])  # few items: spread over spans
    check(quick, [(long, 1600, 1700), (long, 500, 530), (long, 1023, 1024), (long, 1024, 1025)])


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (14, 2), (9, 1), (16, 1), (20, 1), (40, 2)])
def test_groups_of_heads(kernels: Any, heads: Heads) -> None:
    chunks = [(stream(end, heads, 16, seed=end), start, end) for start, end in [(69, 70), (10, 20), (0, 3), (0, 1)]]
    check(kernels, chunks)


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 100])
@pytest.mark.parametrize("dtype", HALVES)
def test_block_sizes_and_edges_of_tiles_and_spans(kernels: Any, block_size: int, dtype: torch.dtype) -> None:
    own = stream(1100, (2, 1), 16, dtype)
    ends = [1, 2, 63, 64, 65, 128, 511, 512, 513, 1024, 1025, 1100]
    check(kernels, [(own, end - 1, end) for end in ends], block_size)
    check(kernels, [(own, end - 2, end) for end in ends[1:]], block_size)


def test_float32_over_long_contexts(kernels: Any) -> None:
    own = stream(1100, (2, 1), 16, torch.float32)
    check(kernels, [(own, 1099, 1100), (own, 511, 514), (own, 0, 40)], 5)


@pytest.mark.parametrize("window", [1, 20, 64, 100, 600])
def test_windows(kernels: Any, window: int, dtype: torch.dtype) -> None:
    own = stream(1100, (2, 1), 16, dtype)
    check(kernels, [(own, 1099, 1100), (own, 1060, 1100), (own, 10, 30), (own, 0, 1), (own, 520, 521)], window=window)


def test_alibi(kernels: Any, dtype: torch.dtype) -> None:
    own = stream(700, (4, 2), 64, dtype)
    slopes = torch.tensor([0.5, 0.01, 0.0, 0.25])
    chunks = [(own, 699, 700), (own, 660, 700), (own, 0, 20), (own, 0, 1)]
    check(kernels, chunks, slopes=slopes)
    check(kernels, chunks, slopes=slopes, window=70)


SHAPES = [((16, 8), 64), ((4, 4), 20), ((7, 1), 80), ((8, 2), 128)]
SMALL = [
    ((3, 1), 64, torch.float16),
    ((2, 2), 20, torch.bfloat16),
    ((2, 1), 128, torch.bfloat16),
    ((1, 1), 256, torch.bfloat16),
    ((2, 1), 7, torch.float32),
]


def check_company(
    kernels: Any, length: int, heads: Heads, dim: int, dtype: torch.dtype, cuts: list[Any], crowd: list[tuple[int, int]]
) -> None:
    """Tokens alone, in chunks cut anywhere, and among other sequences: always the same bits."""
    subject = stream(length, heads, dim, dtype)
    whole = page([(subject, 0, length)]).run(kernels)
    some = [i for i in (0, 1, 14, 15, 16, 62, 63, 64, 65, 100, 127, 128, 139, 199) if i < length]
    for position in some:
        alone = page([(subject, position, position + 1)]).run(kernels)
        assert same_bits(alone[0], whole[position]), position
    every = [(subject, position, position + 1) for position in some]
    assert same_bits(page(every).run(kernels), whole[some])
    assert same_bits(page(every[6:7], 5, width=200).run(kernels)[0], whole[63])
    for cut in cuts:
        parts = [page([(subject, a, b)], 8).run(kernels) for a, b in itertools.pairwise([*cut, length])]
        assert same_bits(torch.cat(parts), whole), cut
    others = [(stream(end, heads, dim, dtype, seed=1 + i), start, end) for i, (start, end) in enumerate(crowd)]
    before = sum(end - start for start, end in crowd[:2])
    for start, end, block_size in [(0, 50, 1), (50, 51, 4), (51, length - 50, 32), (length - 50, length, 7)]:
        out = page([*others[:2], (subject, start, end), *others[2:]], block_size).run(kernels)
        assert same_bits(out[before : before + end - start], whole[start:end]), (start, end)


@pytest.mark.parametrize(("heads", "dim", "dtype"), SMALL)
def test_bits_do_not_depend_on_company(kernels: Any, heads: Heads, dim: int, dtype: torch.dtype) -> None:
    cuts: list[Any] = [(0, 2, 4, 17, 62, 64, 128), (0, 70)]
    check_company(kernels, 140, heads, dim, dtype, cuts, [(69, 70), (0, 30), (30, 57)])


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_bits_do_not_depend_on_more_company(quick: Any, heads: Heads, dim: int, dtype: torch.dtype) -> None:
    cuts = [range(0, 200, size) for size in (2, 3, 13, 70, 128)]
    check_company(quick, 200, heads, dim, dtype, cuts, [(89, 90), (0, 90), (30, 77)])


def check_spans(kernels: Any, **more: object) -> None:
    subject = stream(1100, (2, 1), 16)
    for start, end in [(490, 580), (1000, 1040), (1060, 1100)]:
        whole = page([(subject, start, end)], **more).run(kernels)
        some = [i for i in (490, 511, 512, 513, 575, 576, 1023, 1024, 1025, 1099) if start <= i < end]
        alone = page([(subject, i, i + 1) for i in some], **more).run(kernels)
        assert same_bits(alone, whole[[i - start for i in some]])
        parts = [page([(subject, a, b)], 64, **more).run(kernels) for a, b in [(start, start + 23), (start + 23, end)]]
        assert same_bits(torch.cat(parts), whole)
    assert same_bits(page([(subject, 1099, 1100)], 7, width=900, **more).run(kernels)[0], whole[-1])


def test_bits_over_several_spans(kernels: Any) -> None:
    check_spans(kernels)


@pytest.mark.parametrize(
    "more", [{"window": 300}, {"window": 30}, {"slopes": torch.tensor([0.003, 0.2])}],
    ids=["window-300", "window-30", "alibi"],
)  # fmt: skip
def test_bits_over_several_spans_of_windows(kernels: Any, more: dict[str, object]) -> None:
    check_spans(kernels, **more)


def test_large_prefills(kernels: Any) -> None:
    """On a GPU, tiles of 128 rows make the bits of those of 64."""
    heads = (64, 8)
    chunks = [(stream(end, heads, 16, seed=end), start, end) for start, end in [(0, 90), (45, 130), (50, 70)]]
    tokens = sum(end - start for _, start, end in chunks)
    assert tokens * 8 // 128 * 8 >= 96
    out = page(chunks).run(kernels)
    parts = []
    for own, start, end in chunks:
        parts += [page([(own, i, min(i + 40, end))]).run(kernels) for i in range(start, end, 40)]
    assert same_bits(torch.cat(parts), out)
    check(kernels, chunks)


def test_many_sequences(kernels: Any) -> None:
    """More than a warp can count at once."""
    lengths = [1 + i % 3 for i in range(70)]
    check(kernels, [(stream(40 + n, seed=i), 40, 40 + n) for i, n in enumerate(lengths)], 8)


@pytest.mark.parametrize("infinite", [False, True])
def test_later_tokens_of_a_chunk_cannot_reach_earlier_ones(kernels: Any, dtype: torch.dtype, infinite: bool) -> None:
    clean = stream(80, (4, 2), 64, dtype)
    spoilt = replace(clean, key=clean.key.clone(), value=clean.value.clone())
    spoilt.key[70:] = torch.nan
    if infinite and not is_gpu(kernels):  # whose matrix unit adds a weight of 0 times it
        spoilt.value[70] = torch.inf
    a, b = (page([(own, 0, 80)]).run(kernels) for own in (clean, spoilt))
    assert same_bits(a[:70], b[:70])
    assert b[70:].isnan().all()
    assert page([(spoilt, 79, 80)]).run(kernels).isnan().all()


def test_tokens_before_a_window_cannot_reach_later_ones(on_cpu: Any, dtype: torch.dtype) -> None:
    """A matrix unit multiplies what a row does not see by a weight of 0: no infinity may be there."""
    clean = stream(140, (4, 2), 64, dtype)
    spoilt = replace(clean, value=clean.value.clone())
    spoilt.value[[10, 66]] = torch.inf
    a, b = (page([(own, 0, 140)], window=20).run(on_cpu) for own in (clean, spoilt))
    for seen in (range(10), range(30, 66), range(86, 140)):
        assert same_bits(a[list(seen)], b[list(seen)])
    assert not b[10:30].isfinite().any() and not b[66:86].isfinite().any()
    for i in (9, 15, 30, 63, 64, 90):
        assert same_bits(page([(spoilt, i, i + 1)], window=20).run(on_cpu).nan_to_num(), b[i : i + 1].nan_to_num())


@pytest.mark.parametrize("dtype", HALVES)
def test_great_values_of_later_tokens_change_nothing(kernels: Any, dtype: torch.dtype) -> None:
    """A weight of 0 takes part in a product's sum: it must not cost small ones their last bits."""
    small = stream(150, (2, 1), 64, dtype)
    small.value *= 2.0**-12
    great = replace(small, value=small.value.clone())
    great.value[70:] *= 2.0**22
    out = page([(great, 0, 150)]).run(kernels)
    assert same_bits(out[:70], page([(small, 0, 150)]).run(kernels)[:70])
    alone = page([(great, i, i + 1) for i in (0, 5, 40, 63, 64, 69)]).run(kernels)
    assert same_bits(alone, out[[0, 5, 40, 63, 64, 69]])


def test_great_scores_do_not_overflow(kernels: Any, dtype: torch.dtype) -> None:
    own = stream(150, (4, 2), 64, dtype)
    own.query *= 300
    for chunk in [(own, 0, 150), (own, 149, 150)]:
        call = page([chunk], scale=10.0)
        out = call.run(kernels)
        assert out.isfinite().all()
        # Scores of some 1e5 have an ulp of 1e-2 in float32, so weights are only that certain.
        assert (out.double() - exact(*chunk, 10.0)).abs().max() < 0.1
        for scale in (-1e30, 0.0, -0.125):
            out = page([chunk], scale=scale).run(kernels)
            assert out.isfinite().all()
        own_error = (out.double() - exact(*chunk, -0.125)).abs().max()
        assert own_error < 0.1


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_infinite_scores(kernels: Any, value: float) -> None:
    """A key with score -inf has no weight, even where a whole tile of them comes first."""
    own = stream(140, (2, 2), 16, torch.float32, seed=5)
    own.query[..., 0] = 1.0
    own.key[..., 0] = value
    own.key[:70, :, 0] = -torch.inf
    own.key[100, :, 0] = -torch.inf
    out = page([(own, 0, 140)]).run(kernels)
    expected = exact(own, 0, 140, 0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out[70:].isfinite().all()


def test_zero_scale_is_the_mean(kernels: Any, dtype: torch.dtype) -> None:
    own = stream(70, dtype=dtype)
    for chunk in [(own, 60, 70), (own, 69, 70)]:
        check(kernels, [chunk], scale=0.0)


@pytest.mark.parametrize("dim", [64, 7])
def test_any_address(kernels: Any, dim: int, dtype: torch.dtype) -> None:
    """Rows that cannot be read 16 bytes at a time, whatever the head size."""
    own = stream(80, (2, 1), dim, dtype)
    for chunk in [(own, 79, 80), (own, 30, 80)]:
        call = page([chunk])
        moved = torch.full((call.keys.numel() + 1,), torch.nan, dtype=dtype)[1:].view_as(call.keys)
        moved.copy_(call.keys)
        assert same_bits(replace(call, keys=moved).run(kernels), call.run(kernels))


def test_one_token_returns_its_value(kernels: Any) -> None:
    own = stream(1, (4, 2), 24, torch.bfloat16)
    out = page([(own, 0, 1)]).run(kernels)
    assert same_bits(out, own.value.repeat_interleave(2, 1))


def test_nothing_to_do(kernels: Any) -> None:
    assert page([(stream(5), 5, 5)]).run(kernels).shape == (0, 2, 16)
    call = page([(stream(5, (4, 2), 16, torch.float32), 5, 5)], 4)
    assert call.run(kernels).shape == (0, 4, 16)
