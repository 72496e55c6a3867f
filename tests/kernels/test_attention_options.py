"""What paged attention does besides: windows, chunks, ALiBi, soft caps, sinks, scales of heads, values of another size,
tokens that see later ones.

Each against float64, together with the others, and without a bit that depends on company.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import HALVES, Heads, Stream, check, exact, page, stream, tolerance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import is_gpu, same_bits

from quire.kernels import reference

F32 = torch.float32
WINDOWS = [1, 2, 17, 63, 64, 65, 100, 512, 600, 5000]
# Key sizes and value sizes.
SIZES = [(1, 1), (7, 7), (64, 64), (100, 33), (33, 100), (16, 16), (128, 128), (192, 128), (300, 300), (576, 512)]


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """The oracle's small products are slower on many threads; the kernel's threads have tests of their own."""


def some_slow(values: Any, *quick: Any) -> list[Any]:
    """Parameters, of which all but some wait for `make test-all`."""
    return [pytest.param(*(one if isinstance(one, tuple) else [one]), marks=[] if one in quick else [pytest.mark.slow])
            for one in values]  # fmt: skip


def per_head(heads: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed)) * scale + shift


def slopes_of(heads: int, seed: int = 1, most: float = 0.3) -> torch.Tensor:
    """Not negative: where far keys scored highest, the scores' own rounding would show."""
    return torch.rand(heads, generator=torch.Generator().manual_seed(seed)) * most


def everything(heads: int, window: int = 0) -> dict[str, Any]:
    """All options of a call but visible_end."""
    return {
        "window": window, "slopes": slopes_of(heads), "softcap": 2.5, "sinks": per_head(heads, 2, 2.0),
        "head_scales": per_head(heads, 3, 0.3, 1.0),
    }  # fmt: skip


def ends_of(chunks: list[Any], ranges: list[int]) -> torch.Tensor:
    """visible_end where tokens see up to the end of the range that they are in, or of the context."""
    ends = []
    for _, start, end in chunks:
        bounds = [place for place in ranges if place < end] + [end]
        ends += [next(bound for bound in bounds if position < bound) for position in range(start, end)]
    return torch.tensor(ends, dtype=torch.int32)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_options_together_match_float64(quick: Any, data: st.DataObject) -> None:
    def maybe(value: Any) -> Any:
        return value if data.draw(st.booleans()) else None

    heads = data.draw(st.sampled_from([(1, 1), (3, 1), (6, 2), (7, 7), (10, 5), (9, 1)]))
    dim, value_dim = data.draw(st.sampled_from(SIZES[:8]))
    dtype, block_size = data.draw(st.sampled_from([F32, *HALVES])), data.draw(st.sampled_from([1, 5, 8, 16, 64]))
    chunks, seed = [], data.draw(st.integers(0, 2**31))
    for i in range(data.draw(st.integers(1, 4))):
        own, past = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 3, 64, 130, 500, 700]))
        chunks.append((stream(past + own, heads, dim, dtype, seed + i, value_dim), past, past + own))
    options = {
        "window": maybe(data.draw(st.sampled_from(WINDOWS))) or 0,
        "slopes": maybe(slopes_of(heads[0], seed % 1000)),
        "softcap": maybe(data.draw(st.sampled_from([0.5, 3.0, 50.0]))) or 0.0,
        "sinks": maybe(per_head(heads[0], seed % 999, 3.0)),
        "head_scales": maybe(per_head(heads[0], seed % 998, 0.5, 1.0)),
        "visible_end": maybe(ends_of(chunks, [2, 20, 66, 140, 505, 512, 710])),
        "chunk": maybe(data.draw(st.sampled_from(WINDOWS))) or 0,
    }
    check(quick, chunks, block_size, stale=True, apart=data.draw(st.sampled_from([0, 3, 64])), **options)


@pytest.mark.parametrize("window", some_slow(WINDOWS, 1, 64, 600))
def test_windows_and_what_lies_before_them(kernels: Any, window: int) -> None:
    """The table says of blocks before a window that there are none, or names such as hold others' tokens by now."""
    own = stream(1200, (3, 1), 24)
    chunks = [(own, 1199, 1200), (own, 1100, 1200), (own, 10, 30), (own, 0, 1), (own, 520, 521), (own, 500, 600)]
    for block_size in (1, 8, 48):
        check(kernels, chunks, block_size, stale=True, window=window)


@pytest.mark.parametrize("chunk", some_slow(WINDOWS, 17, 64, 600))
def test_chunks_and_what_lies_before_them(kernels: Any, chunk: int) -> None:
    own = stream(1200, (3, 1), 24)
    chunks = [(own, 1199, 1200), (own, 1100, 1200), (own, 10, 30), (own, 0, 1), (own, 520, 521), (own, 500, 640)]
    for block_size in (1, 8, 48):
        check(kernels, chunks, block_size, stale=True, chunk=chunk)
    check(kernels, chunks, stale=True, chunk=chunk, window=50)


@pytest.mark.parametrize("window", [1, 40, 64, 130])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (20, F32)])
def test_nothing_unseen_reaches_a_token(kernels: Any, window: int, dim: int, dtype: torch.dtype) -> None:
    """Be it in the same block, the same tile, or seen by a neighbour."""
    clean = stream(300, (4, 2), dim, dtype)
    spoilt = replace(clean, key=clean.key.clone(), value=clean.value.clone())
    spoilt.key[100] = torch.nan
    if dtype is F32 or not is_gpu(kernels):  # whose matrix unit adds a weight of 0 times it
        spoilt.value[100] = torch.inf
    a, b = (page([(own, 0, 300)], window=window).run(kernels) for own in (clean, spoilt))
    sees = torch.zeros(300, dtype=torch.bool)
    sees[100 : 100 + window] = True
    assert same_bits(a[~sees], b[~sees])
    assert b[sees].isnan().all()
    for position in (99, 100 + window, 299):
        alone = page([(spoilt, position, position + 1)], window=window).run(kernels)
        assert same_bits(alone[0], a[position])


@pytest.mark.parametrize(("dim", "value_dim"), some_slow(SIZES, (7, 7), (100, 33), (192, 128)))
def test_sizes_of_keys_and_values(kernels: Any, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    heads = (4, 2) if dim < 300 else (5, 1)
    chunks = [(stream(end, heads, dim, dtype, end, value_dim), start, end) for start, end in [(69, 70), (20, 61)]]
    check(kernels, chunks, 8, apart=5)
    check(kernels, chunks, 8, apart=32, **everything(heads[0], 31))
    together = page(chunks, 8).run(kernels)
    assert same_bits(page(chunks, 8, apart=48).run(kernels), together)


def test_values_that_are_the_first_columns_of_the_keys(kernels: Any, dtype: torch.dtype) -> None:
    own = stream(600, (5, 1), 96, dtype)
    own = replace(own, value=own.key[..., :64].contiguous())
    chunks = [(own, 599, 600), (own, 100, 130)]
    call = page(chunks, 8)
    shared = replace(call, values=call.keys[..., :64])
    assert same_bits(shared.run(kernels), call.run(kernels))
    check(kernels, chunks)


def magnitudes(scale: float) -> Stream:
    """Two keys that score 0, and scale: what a soft cap makes of a score shows in the weights."""
    own = stream(2, (1, 1), 16, F32)
    own.query[:], own.key[0], own.key[1], own.value[0], own.value[1] = 1.0, 0.0, scale / 16, 0.0, 1.0
    return own


def test_soft_caps_of_scores_of_every_size(kernels: Any) -> None:
    scores = [1e-6, 1e-3, 0.1, 0.3, 0.31, 0.32, 1.0, 4.0, 30.0, 1e30, -0.1, -0.32, -2.0, -1e30]
    for softcap, score in itertools.product((0.5, 15.0), scores):
        own = magnitudes(score)
        out = page([(own, 0, 2)], scale=1.0, softcap=softcap).run(kernels)
        torch.testing.assert_close(out.double(), exact(own, 0, 2, 1.0, softcap=softcap), rtol=4e-6, atol=1e-12)


def test_a_soft_cap_leaves_no_infinite_score(kernels: Any) -> None:
    own = stream(80, (1, 1), 16, F32)
    own.query[..., 0] = 1.0
    own.key[10, 0, 0], own.key[20, 0, 0] = torch.inf, -torch.inf
    out = page([(own, 60, 80)], softcap=3.0).run(kernels)
    expected = exact(own, 60, 80, 0.25, softcap=3.0)
    assert expected.isfinite().all()
    assert (out.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("sink", [-torch.inf, -200.0, -3.0, 0.0, 5.0, 300.0])
def test_sinks_of_every_size(kernels: Any, sink: float, dtype: torch.dtype) -> None:
    own = stream(600, (3, 1), 20, dtype)
    sinks = torch.tensor([sink, 0.5, sink])
    chunks = [(own, 599, 600), (own, 0, 1), (own, 30, 70)]
    check(kernels, chunks, sinks=sinks)
    out = page(chunks, sinks=sinks).run(kernels)
    if sink == -torch.inf:
        assert same_bits(out[:, 0], page(chunks).run(kernels)[:, 0])
    if sink == 300.0:
        assert (out[:, 0].float().abs() < 1e-30).all()


def test_a_sink_is_all_that_is_left_where_no_key_has_a_weight(kernels: Any) -> None:
    own = stream(100, (1, 1), 16, F32)
    own.query[..., 0], own.key[..., 0] = 1.0, -torch.inf
    assert (page([(own, 90, 100)], sinks=torch.zeros(1)).run(kernels) == 0).all()


def test_a_scale_for_each_head(kernels: Any, dtype: torch.dtype) -> None:
    own, scales = stream(200, (4, 2), 64, dtype), torch.tensor([1.0, 0.0, -0.5, 2.0])
    chunks = [(own, 199, 200), (own, 10, 50)]
    check(kernels, chunks, head_scales=scales)
    out = page(chunks, head_scales=scales).run(kernels)
    if dtype is F32 or not is_gpu(kernels):  # which otherwise scales when it makes weights of scores
        assert same_bits(out[:, 0], page(chunks).run(kernels)[:, 0])


def test_ranges_whose_tokens_see_one_another(kernels: Any, dtype: torch.dtype) -> None:
    own = stream(700, (6, 2), 32, dtype)
    chunks = [(own, 0, 50), (own, 480, 540), (own, 699, 700)]
    both_ways = ends_of(chunks, [])
    assert set(both_ways.tolist()) == {50, 540, 700}
    for ends in (both_ways, ends_of(chunks, [1, 2, 17, 45, 500, 512, 513])):
        check(kernels, chunks, visible_end=ends)
        check(kernels, chunks, visible_end=ends, **everything(6, 40), stale=True)
    causal = torch.cat([torch.arange(start + 1, end + 1) for _, start, end in chunks]).int()
    assert same_bits(page(chunks, visible_end=causal).run(kernels), page(chunks).run(kernels))


# Promise 1

CASES: list[tuple[Heads, int, torch.dtype]] = [
    ((3, 1), 64, torch.float16),
    ((2, 2), 20, torch.bfloat16),
    ((1, 1), 256, torch.bfloat16),
    ((2, 1), 7, F32),
]
# Too much for the emulation.
LARGE_CASES: list[tuple[Heads, int, torch.dtype]] = [((5, 5), 128, torch.bfloat16), ((14, 2), 64, F32)]
OPTIONS = {
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": None},
    "scales": {"head_scales": None},
    "window-1": {"window": 1},
    "window-33": {"window": 33},
    "window-64": {"window": 64},
    "window-larger": {"window": 500},
    "chunk-1": {"chunk": 1},
    "chunk-33": {"chunk": 33},
    "chunk-64": {"chunk": 64},
    "chunk-larger": {"chunk": 500},
    "all-chunk-50": {"window": 40, "chunk": 50, "slopes": None, "softcap": 2.0, "sinks": None, "head_scales": None},
    "all-50": {"window": 50, "slopes": None, "softcap": 2.0, "sinks": None, "head_scales": None},
    "all-130": {"window": 130, "slopes": None, "softcap": 2.0, "sinks": None, "head_scales": None},
}


SPANNING = ["window-1", "window-33", "window-larger", "chunk-33", "chunk-larger", "all-chunk-50", "all-130", "sinks"]


def options_for(heads: Heads, name: str) -> dict[str, Any]:
    whole = everything(heads[0])
    return {key: whole[key] if value is None else value for key, value in OPTIONS[name].items()}


def check_company(kernels: Any, heads: Heads, dim: int, dtype: torch.dtype, name: str) -> None:
    """Alone, in chunks cut anywhere, in blocks of any size, among others."""
    length, options = 170, options_for(heads, name)
    subject = stream(length, heads, dim, dtype)
    whole = page([(subject, 0, length)], **options).run(kernels)
    some = [0, 1, 15, 16, 31, 32, 33, 34, 49, 50, 51, 63, 64, 65, 97, 128, 129, 130, 131, 169]
    every = [(subject, position, position + 1) for position in some]
    assert same_bits(page(every, stale=True, **options).run(kernels), whole[some])
    for position in (64, 169):
        alone = page([(subject, position, position + 1)], 5, width=200, **options).run(kernels)
        assert same_bits(alone[0], whole[position])
    for cut in [(0, 2, 4, 17, 62, 64, 128), (0, 70), range(0, length, 13)]:
        parts = [page([(subject, a, b)], 8, **options).run(kernels) for a, b in itertools.pairwise([*cut, length])]
        assert same_bits(torch.cat(parts), whole), cut
    others = [(stream(end, heads, dim, dtype, seed=end), start, end) for start, end in [(69, 70), (0, 30), (30, 57)]]
    for start, end, block_size in [(0, 50, 1), (50, 51, 4), (51, 120, 32), (120, length, 7)]:
        out = page([*others[:2], (subject, start, end), *others[2:]], block_size, **options).run(kernels)
        assert same_bits(out[31 : 31 + end - start], whole[start:end]), (start, end)


@pytest.mark.parametrize("name", some_slow(OPTIONS, "window-33", "chunk-33", "all-50"))
@pytest.mark.parametrize(("heads", "dim", "dtype"), some_slow(CASES, CASES[0]))
def test_bits_do_not_depend_on_company(kernels: Any, heads: Heads, dim: int, dtype: torch.dtype, name: str) -> None:
    check_company(kernels, heads, dim, dtype, name)


@pytest.mark.parametrize("name", some_slow(OPTIONS, "window-33", "all-50"))
@pytest.mark.parametrize(("heads", "dim", "dtype"), some_slow(LARGE_CASES, LARGE_CASES[1]))
def test_bits_do_not_depend_on_more_company(quick: Any, heads: Heads, dim: int, dtype: torch.dtype, name: str) -> None:
    check_company(quick, heads, dim, dtype, name)


@pytest.mark.parametrize("name", some_slow(SPANNING, "all-130"))
def test_bits_over_several_spans(kernels: Any, name: str) -> None:
    """Rows of one item of work whose windows begin in spans of their own."""
    heads = (2, 1)
    subject, options = stream(1600, heads, 16), options_for(heads, name)
    for start, end in [(490, 580), (1000, 1060), (1530, 1600)]:
        whole = page([(subject, start, end)], **options).run(kernels)
        for a, b in itertools.pairwise(range(start, end + 1, 10)):
            parts = page([(subject, a, b)], 64, stale=True, **options).run(kernels)
            assert same_bits(parts, whole[a - start : b - start]), a
        alone = [page([(subject, i, i + 1)], 7, width=400, **options).run(kernels) for i in range(start, end, 7)]
        assert same_bits(torch.cat(alone), whole[::7])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("heads", "dim", "dtype"), some_slow([*CASES[:2], *LARGE_CASES], CASES[0]))
def test_bits_of_ranges_do_not_depend_on_company(
    kernels: Any, heads: Heads, dim: int, dtype: torch.dtype, window: int
) -> None:
    """Chunks end where ranges do: a token of a range that is not whole has other keys to see."""
    subject, ranges = stream(200, heads, dim, dtype), [1, 2, 30, 31, 95, 130, 191]

    def run(chunks: list[Any], block_size: int = 16) -> torch.Tensor:
        return page(chunks, block_size, window=window, visible_end=ends_of(chunks, ranges)).run(kernels)

    whole = run([(subject, 0, 200)])
    for cut in [[0, *ranges], [0, 30, 130], [0, 191]]:
        parts = [run([(subject, a, b)], 8) for a, b in itertools.pairwise([*cut, 200])]
        assert same_bits(torch.cat(parts), whole), cut
    other = stream(90, heads, dim, dtype, seed=9)
    out = run([(other, 60, 90), (subject, 95, 130), (other, 0, 20)], 5)
    assert same_bits(out[30:65], whole[95:130])


def test_all_back_ends_agree(kernels: Any, dtype: torch.dtype) -> None:
    chunks = [(stream(end, (6, 2), 40, dtype, end, 24), start, end) for start, end in [(599, 600), (0, 70), (80, 90)]]
    call = page(chunks, apart=8, visible_end=ends_of(chunks, [30, 60]), **everything(6, 45))
    wanted, got = call.run(reference), call.run(kernels)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=3 * tolerance(kernels, dtype))


def test_writing_keys_alone(kernels: Any, dtype: torch.dtype) -> None:
    slots = torch.tensor([7, 0, 13, 9])
    key = torch.randn(4, 5, 12).to(dtype)[:, :3]  # tokens apart
    keys = torch.zeros(4, 3, 4, 12, dtype=dtype)
    kernels.write_kv(key, None, keys, None, slots)
    again, values, value = torch.zeros_like(keys), torch.zeros(4, 3, 4, 5, dtype=dtype), torch.randn(4, 3, 5).to(dtype)
    kernels.write_kv(key, value, again, values, slots)
    assert same_bits(keys, again)
    for t, slot in enumerate(slots.tolist()):
        assert same_bits(keys[slot // 4, :, slot % 4], key[t])
        assert same_bits(values[slot // 4, :, slot % 4], value[t])
    assert keys.count_nonzero() == 4 * 3 * 12 and values.count_nonzero() == 4 * 3 * 5
