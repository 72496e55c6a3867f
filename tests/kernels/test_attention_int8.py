"""A cache of int8: what is stored, attention over it, and that no bit of either depends on company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import HEAD_DIMS, Heads, Stream, as_stored, check, page, rounds_weights, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import same_bits

from quire.errors import QuireError
from quire.kernels import reference
from quire.types import KVCache, int8_row_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(1, 1), (4, 4), (6, 2), (14, 2), (12, 4)]


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """The oracle's small products are slower on many threads."""


def empty(blocks: int, heads: int, block_size: int, dim: int, value_dim: int) -> KVCache:
    keys, values = (torch.full((blocks, heads, block_size, int8_row_bytes(n)), 99).char() for n in (dim, value_dim))
    return KVCache.of_rows(keys, values, dim, value_dim)


def store(kernels: Any, key: torch.Tensor, value: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> None:
    kernels.write_kv(key, value, cache.keys, cache.values, slots, cache.key_scales, cache.value_scales)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (7, 1), (80, 33), (576, 512), (1, 100), (16, 18)])
def test_rows_are_whole_numbers_and_a_scale(on_cpu: Any, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """To the last bit on every processor, in their slots and nowhere else."""
    generator = torch.Generator().manual_seed(dim)
    key, value = (torch.randn(23, 3, n, generator=generator) for n in (dim, value_dim))
    key[1], key[2], value[3] = (
        0.0,
        key[2] * 2.0**-140,
        value[3] * 2.0**-120,
    )  # none, below what a scale can be, denormal
    key[4], value[5] = key[4] * 1e4, value[5] * 3e-5
    key, value = key.to(dtype), value.to(dtype)
    slots = torch.randperm(40, generator=generator)[:23]
    cache, before = (empty(8, 3, 5, dim, value_dim) for _ in range(2))
    store(on_cpu, key, value, cache, slots)
    block, offset = slots // 5, slots % 5
    for rows, whole, scales, numbers in (
        (key, cache.keys, cache.key_scales, dim), (value, cache.values, cache.value_scales, value_dim),
    ):  # fmt: skip
        assert scales is not None
        x, scale = rows.float(), rows.float().abs().amax(-1, keepdim=True) / 127
        assert torch.equal(scales[block, :, offset], scale)
        wanted = torch.where(scale > 0, (x / scale).round(), 0.0).clamp(-127, 127)
        assert torch.equal(whole[block, :, offset], wanted.char())
        kept = whole[block, :, offset] * scale
        assert ((kept - x).abs() <= scale * (0.5 + 1e-4))[scale.squeeze(-1) > 1e-30].all(), numbers
    for now, old in zip(cache.rows, before.rows, strict=True):
        now[block, :, offset] = old[block, :, offset]
        assert torch.equal(now, old), "a byte of another slot has changed"


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan(on_cpu: Any, wrong: float, dtype: torch.dtype) -> None:
    key = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    clean, spoilt = empty(1, 2, 4, 40, 40), empty(1, 2, 4, 40, 40)
    store(on_cpu, key, key, clean, torch.arange(3))
    bad = key.clone()
    bad[1, 0, 33] = wrong
    store(on_cpu, bad, key, spoilt, torch.arange(3))
    assert spoilt.key_scales is not None and clean.key_scales is not None
    assert spoilt.key_scales[0, 0, 1].isnan() and not spoilt.keys[0, 0, 1].any()
    spoilt.rows[0][0, 0, 1] = clean.rows[0][0, 0, 1]
    assert torch.equal(spoilt.rows[0], clean.rows[0]) and torch.equal(spoilt.rows[1], clean.rows[1])


def test_keys_alone_are_stored(on_cpu: Any) -> None:
    key = torch.randn(3, 1, 24, generator=torch.Generator().manual_seed(1))
    cache, both = empty(1, 1, 4, 24, 24), empty(1, 1, 4, 24, 24)
    on_cpu.write_kv(key, None, cache.keys, None, torch.arange(3), cache.key_scales)
    store(on_cpu, key, key, both, torch.arange(3))
    assert torch.equal(cache.rows[0], both.rows[0]) and (cache.rows[1] == 99).all()


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_mix_matches_float64(on_cpu: Any, data: st.DataObject) -> None:
    heads, dim = data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(HEAD_DIMS))
    dtype, block_size = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 4, 8, 16, 32]))
    seed = data.draw(st.integers(0, 2**31))
    chunks = []
    for i in range(data.draw(st.integers(1, 5))):
        own, past = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 230))
        chunks.append((stream(past + own, heads, dim, dtype, seed + i), past, past + own))
    check(on_cpu, chunks, block_size, int8=True)


@pytest.mark.parametrize(("dim", "value_dim"), [(7, 7), (64, 64), (100, 33), (33, 100), (192, 128), (300, 300)])
def test_sizes_match_the_reference(cpu: Any, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    spans = [(0, 1), (40, 41), (0, 67), (100, 131)]
    chunks = [(stream(end, (6, 2), dim, dtype, end, value_dim), start, end) for start, end in spans]
    check(cpu, chunks, 8, int8=True, apart=3)
    call = page(chunks, int8=True)
    atol = 6e-3 if rounds_weights(cpu, dtype) else 1e-3
    torch.testing.assert_close(call.run(cpu), call.run(reference), rtol=2.0**-7, atol=atol)


def options(heads: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads)
    return {
        "slopes": torch.rand(heads, generator=generator) * 0.3, "softcap": 2.5,
        "sinks": torch.randn(heads, generator=generator), "head_scales": 1 + torch.rand(heads, generator=generator),
    }  # fmt: skip


@pytest.mark.parametrize("more", [{"window": 70}, {"chunk": 90}, {"window": 5, "chunk": 64}, {}])
def test_every_option(on_cpu: Any, more: dict[str, int], dtype: torch.dtype) -> None:
    own = stream(700, (4, 2), 64, dtype)
    check(on_cpu, [(own, 699, 700), (own, 660, 700), (own, 0, 20), (own, 0, 1)], int8=True, **options(4), **more)


def test_tokens_that_see_later_ones(on_cpu: Any, dtype: torch.dtype) -> None:
    own = stream(150, (4, 2), 32, dtype)
    ends = torch.tensor([*[90] * 50, *range(91, 151)], dtype=torch.int32)
    check(on_cpu, [(own, 40, 150)], int8=True, visible_end=ends)


def same_in_company(kernels: Any, subject: Stream, cuts: list[list[int]], **more: Any) -> None:
    """Tokens alone, in chunks cut anywhere and among others: always the same bits."""
    length = len(subject.query)
    whole = page([(subject, 0, length)], int8=True, **more).run(kernels)
    some = [i for i in (0, 1, 15, 16, 62, 63, 64, 65, 127, 128, 511, 512, 1024) if i < length]
    for i in some:
        assert same_bits(page([(subject, i, i + 1)], 5, int8=True, **more).run(kernels)[0], whole[i]), i
    every = [(subject, i, i + 1) for i in some]
    assert same_bits(page(every, 8, int8=True, **more).run(kernels), whole[some])
    for cut in cuts:
        parts = [page([(subject, a, b)], 8, int8=True, **more).run(kernels) for a, b in itertools.pairwise(cut)]
        assert same_bits(torch.cat(parts), whole[: cut[-1]]), cut
    heads: Heads = (subject.query.shape[1], subject.key.shape[1])
    other = stream(90, heads, subject.query.shape[2], subject.query.dtype, 7, subject.value.shape[2])
    crowd = [(other, 0, 30), (subject, 20, length), (other, 89, 90)]
    assert same_bits(page(crowd, 4, int8=True, **more).run(kernels)[30 : 10 + length], whole[20:])


@pytest.mark.parametrize(("heads", "dim"), [((16, 8), 64), ((4, 4), 20), ((7, 1), 80), ((3, 1), 256)])
def test_bits_do_not_depend_on_company(on_cpu: Any, heads: Heads, dim: int, dtype: torch.dtype) -> None:
    same_in_company(on_cpu, stream(140, heads, dim, dtype), [[0, 2, 4, 17, 62, 64, 140], [0, 70, 140]])


@pytest.mark.parametrize("more", [{}, {"window": 300}, {"chunk": 200}])
def test_bits_over_several_spans(cpu: Any, more: dict[str, int], dtype: torch.dtype) -> None:
    same_in_company(cpu, stream(1100, (4, 2), 16, dtype), [[0, 500, 523, 1100]], **options(4), **more)


def test_bits_do_not_depend_on_threads(cpu: Any, dtype: torch.dtype, some_threads: None) -> None:
    subject, short = stream(2100, (4, 2), 64, dtype), stream(20, (4, 2), 64, dtype, seed=1)
    outs = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        outs.append(page([(subject, 2000, 2100)], int8=True).run(cpu))
        outs.append(page([(short, 19, 20)] * 40 + [(subject, 2000, 2100)], 8, int8=True).run(cpu)[40:])
    assert all(same_bits(out, outs[0]) for out in outs)


@pytest.fixture
def some_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_latents_are_values_and_keys_of_one_row(on_cpu: Any, dtype: torch.dtype) -> None:
    own = stream(90, (4, 1), 40, dtype, value_dim=40)
    own = replace(own, value=own.key)
    call = page([(own, 60, 90)], 8, int8=True)
    one = replace(call, values=call.keys[..., :24], more={**call.more, "value_scales": call.more["key_scales"]})
    assert same_bits(one.run(on_cpu), call.run(on_cpu)[..., :24])


def test_a_chunk_sees_its_own_keys_as_they_are_stored(on_cpu: Any, dtype: torch.dtype) -> None:
    """Attention reads the cache alone: what int8 leaves of the keys of the step is all that its tokens know."""
    own = stream(30, (2, 1), 16, dtype)
    fresh, stored = page([(own, 0, 30)]).run(on_cpu), page([(own, 0, 30)], int8=True).run(on_cpu)
    assert not same_bits(fresh, stored)
    kept = as_stored(own)
    wanted = page([(replace(kept, query=own.query.float()), 0, 30)]).run(on_cpu)
    atol = 6e-3 if rounds_weights(on_cpu, dtype) else 1e-5
    torch.testing.assert_close(stored.float(), wanted, rtol=2.0**-7, atol=atol)


def test_later_tokens_cannot_reach_earlier_ones(on_cpu: Any, dtype: torch.dtype) -> None:
    clean = stream(80, (4, 2), 64, dtype)
    spoilt = replace(clean, key=clean.key.clone(), value=clean.value.clone())
    spoilt.key[70:], spoilt.value[75] = torch.nan, torch.inf
    a, b = (page([(own, 0, 80)], int8=True).run(on_cpu) for own in (clean, spoilt))
    assert same_bits(a[:70], b[:70]) and b[70:].isnan().all()


def test_arguments_are_checked(cpu: Any) -> None:
    call = page([(stream(20, (4, 2), 16, torch.float32), 10, 20)], 8, int8=True)
    keys, scales = call.more["key_scales"], call.more["value_scales"]
    assert isinstance(keys, torch.Tensor) and isinstance(scales, torch.Tensor)
    elsewhere = torch.empty(keys.shape[0], keys.shape[1], keys.shape[2], 5)[..., 4:]  # rows as far apart as these
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"value_scales": None}, ValueError, "value_scales"),
        ({"key_scales": None, "value_scales": None}, TypeError, "keys"),
        ({"key_scales": keys.double()}, TypeError, "key_scales"),
        ({"key_scales": keys.contiguous()}, ValueError, "keys"),
        ({"value_scales": scales[:-1]}, ValueError, "value_scales"),
        ({"key_scales": elsewhere}, ValueError, "scales"),
    ]
    for change, error, message in bad:
        with pytest.raises(error, match=message):
            replace(call, more={**call.more, **change}).run(cpu)
    with pytest.raises(TypeError, match="keys"):
        replace(call, keys=call.keys.float()).run(cpu)


@pytest.mark.emulated
def test_a_gpu_refuses_it(emulated_cuda: Any) -> None:
    call = page([(stream(20, (4, 2), 16, torch.float32), 10, 20)], 8, int8=True)
    with pytest.raises(QuireError, match="int8"):
        call.run(emulated_cuda)
    key = torch.randn(3, 1, 24)
    with pytest.raises(QuireError, match="int8"):
        store(emulated_cuda, key, key, empty(1, 1, 4, 24, 24), torch.arange(3))
