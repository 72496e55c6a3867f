"""Paged attention against float64, and its promise: a token's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import same_bits

from quire.kernels import reference

native = pytest.importorskip("quire.kernels.native")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(1, 1), (4, 4), (8, 1), (6, 2), (16, 8), (14, 2), (12, 4)]
HEAD_DIMS = [16, 20, 24, 32, 64, 80, 96, 128, 7, 256]
# Error per unit of the values' magnitude. Half types are rounded on the way out; scores are float32.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
POISON_BLOCK = 1 << 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The oracle's small products are slower on many threads; the kernel's threads have a test below."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Sequence:
    """One sequence's own queries, keys and values at every position, before any paging."""

    query: torch.Tensor  # [length, H, D]
    key: torch.Tensor  # [length, G, D]
    value: torch.Tensor


def make_sequence(
    length: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    spread: float = 1.0,
) -> Sequence:
    def randn(count: int) -> torch.Tensor:
        return torch.randn(length, count, dim, generator=generator).to(dtype)

    query = (randn(heads[0]).float() * spread).to(dtype)
    return Sequence(query, randn(heads[1]), randn(heads[1]))


@dataclass
class Call:
    """Arguments of one `paged_attention`: the chunk [start, end) of each sequence."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    scale: float

    def run(self, kernels: object = native) -> torch.Tensor:
        return kernels.paged_attention(  # type: ignore[attr-defined]
            self.query,
            self.keys,
            self.values,
            self.block_table,
            self.query_start,
            self.context_len,
            self.scale,
        )


def page(
    chunks: list[tuple[Sequence, int, int]],
    block_size: int,
    generator: torch.Generator,
    scale: float | None = None,
) -> Call:
    """Lay the contexts out in random blocks; all that may not be read is NaN or an absurd block id."""
    first = chunks[0][0]
    kv_heads, dim = first.key.shape[1:]
    needed = [-(-end // block_size) for _, _, end in chunks]
    ids = torch.randperm(sum(needed) + 3, generator=generator).int()
    keys = torch.full((len(ids), kv_heads, block_size, dim), torch.nan, dtype=first.key.dtype)
    values = keys.clone()
    table = torch.full((len(chunks), max(needed) + 2), POISON_BLOCK, dtype=torch.int32)
    used = 0
    for s, (sequence, _, end) in enumerate(chunks):
        table[s, : needed[s]] = ids[used : used + needed[s]]
        used += needed[s]
        position = torch.arange(end)
        block, offset = table[s, position // block_size].long(), position % block_size
        keys[block, :, offset] = sequence.key[:end]
        values[block, :, offset] = sequence.value[:end]
    starts = [0]
    for _, start, end in chunks:
        starts.append(starts[-1] + end - start)
    query = torch.cat([sequence.query[start:end] for sequence, start, end in chunks])
    padded = torch.full((len(query), query.shape[1] + 2, dim), torch.nan, dtype=query.dtype)
    padded[:, :-2] = query  # tokens apart, as in a fused projection's output
    return Call(
        padded[:, :-2],
        keys,
        values,
        table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
        dim**-0.5 if scale is None else scale,
    )


def exact(sequence: Sequence, start: int, end: int, scale: float) -> torch.Tensor:
    """The chunk's attention in float64: [end - start, H, D]."""
    group = sequence.query.shape[1] // sequence.key.shape[1]
    q = sequence.query[start:end].double().transpose(0, 1)
    k = sequence.key[:end].double().transpose(0, 1).repeat_interleave(group, 0)
    v = sequence.value[:end].double().transpose(0, 1).repeat_interleave(group, 0)
    future = torch.arange(end) > torch.arange(start, end)[:, None]
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check(chunks: list[tuple[Sequence, int, int]], block_size: int, generator: torch.Generator) -> None:
    call = page(chunks, block_size, generator)
    out = call.run()
    assert out.is_contiguous() and out.dtype is call.query.dtype
    expected = torch.cat([exact(sequence, start, end, call.scale) for sequence, start, end in chunks])
    error = (out.double() - expected).abs() / (1 + expected.abs())
    assert error.max() <= TOLERANCE[out.dtype], f"{error.max():.2e}"


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mix_matches_float64(isa: str, data: st.DataObject) -> None:
    heads, dim = data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(HEAD_DIMS))
    dtype, block_size = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 4, 8, 16, 32]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    chunks = []
    for _ in range(data.draw(st.integers(1, 6))):
        own, past = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 230))
        chunks.append((make_sequence(past + own, heads, dim, dtype, generator), past, past + own))
    check(chunks, block_size, generator)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_size_matches_float64_and_reference(isa: str, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    chunks = [
        (make_sequence(end, (6, 2), dim, dtype, generator), start, end)
        for start, end in [(0, 1), (40, 41), (0, 67), (100, 131)]
    ]
    check(chunks, 8, generator)
    call = page(chunks, 16, generator)
    torch.testing.assert_close(call.run(), call.run(reference), rtol=1e-5, atol=3 * TOLERANCE[dtype])


def test_long_contexts_of_several_spans(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    long = make_sequence(1700, (4, 2), 32, dtype, generator)
    check([(long, 1699, 1700)], 16, generator)  # few items: spread over spans
    check([(long, 1600, 1700), (long, 500, 530), (long, 1023, 1024), (long, 1024, 1025)], 16, generator)


@pytest.mark.parametrize(("heads", "dim"), [((16, 8), 64), ((4, 4), 20), ((7, 1), 80), ((8, 2), 128)])
def test_bits_do_not_depend_on_company(isa: str, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    length = 200
    subject = make_sequence(length, heads, dim, dtype, generator)
    others = [make_sequence(90, heads, dim, dtype, generator) for _ in range(3)]
    whole = page([(subject, 0, length)], 16, generator).run()
    for position in [0, 1, 14, 15, 16, 63, 64, 65, 127, 128, 199]:
        alone = page([(subject, position, position + 1)], 16, generator).run()
        assert same_bits(alone[0], whole[position]), position
    for size in [2, 3, 13, 70, 128]:
        parts = [page([(subject, i, min(i + size, length))], 8, generator).run() for i in range(0, length, size)]
        assert same_bits(torch.cat(parts), whole), size
    for start, end, block_size in [(0, 50, 1), (50, 51, 4), (51, 150, 32), (150, 200, 7)]:
        crowd = [(others[0], 89, 90), (others[1], 0, 90), (subject, start, end), (others[2], 30, 77)]
        out = page(crowd, block_size, generator).run()
        assert same_bits(out[91 : 91 + end - start], whole[start:end]), (start, end)


def test_bits_do_not_depend_on_threads_or_splitting(isa: str, dtype: torch.dtype) -> None:
    """One stream is split by spans where there are threads to spare, and walked in one piece otherwise."""
    generator = torch.Generator().manual_seed(2)
    subject = make_sequence(2100, (4, 2), 64, dtype, generator)
    short = make_sequence(20, (4, 2), 64, dtype, generator)
    chunks = [(subject, 2000, 2100)]
    crowd = [(short, 19, 20)] * 40 + chunks
    outs = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        outs.append(page(chunks, 16, generator).run())
        outs.append(page(crowd, 8, generator).run()[40:])
        alone = [page([(subject, p, p + 1)], 16, generator).run() for p in (2000, 2047, 2048, 2099)]
        outs.append(outs[0].clone().index_copy_(0, torch.tensor([0, 47, 48, 99]), torch.cat(alone)))
    assert all(same_bits(out, outs[0]) for out in outs[1:])


def test_later_tokens_of_a_chunk_cannot_reach_earlier_ones(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    clean = make_sequence(80, (4, 2), 64, torch.float16, generator)
    spoilt = replace(clean, key=clean.key.clone(), value=clean.value.clone())
    spoilt.key[70:] = torch.nan
    spoilt.value[70] = torch.inf
    a, b = (page([(sequence, 0, 80)], 16, generator).run() for sequence in (clean, spoilt))
    assert same_bits(a[:70], b[:70])
    assert b[70:].isnan().all()


def test_great_scores_do_not_overflow(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    sequence = make_sequence(150, (4, 2), 64, dtype, generator, spread=300.0)
    call = page([(sequence, 0, 150)], 16, generator, scale=10.0)
    out = call.run()
    assert out.isfinite().all()
    expected = exact(sequence, 0, 150, 10.0)
    # Scores of some 1e5 have an ulp of 1e-2 in float32, so weights are only that certain.
    assert (out.double() - expected).abs().max() < 0.1
    hopeless = page([(sequence, 0, 150)], 16, generator, scale=-1e30).run()
    assert hopeless.isfinite().all()


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_infinite_scores(isa: str, value: float) -> None:
    """A key with score -inf has no weight, even where a whole tile of them comes first."""
    generator = torch.Generator().manual_seed(5)
    sequence = make_sequence(140, (2, 2), 16, torch.float32, generator)
    sequence.query[..., 0] = 1.0
    sequence.key[..., 0] = value
    sequence.key[:70, :, 0] = -torch.inf
    sequence.key[100, :, 0] = -torch.inf
    out = page([(sequence, 0, 140)], 16, generator).run()
    expected = exact(sequence, 0, 140, 0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out[70:].isfinite().all()


def test_one_token_returns_its_value(isa: str) -> None:
    generator = torch.Generator().manual_seed(6)
    sequence = make_sequence(1, (4, 2), 24, torch.bfloat16, generator)
    out = page([(sequence, 0, 1)], 16, generator).run()
    assert same_bits(out, sequence.value.repeat_interleave(2, 1))


def test_nothing_to_do() -> None:
    generator = torch.Generator().manual_seed(7)
    call = page([(make_sequence(5, (4, 2), 16, torch.float32, generator), 5, 5)], 4, generator)
    assert call.run().shape == (0, 4, 16)


def test_arguments_are_checked() -> None:
    generator = torch.Generator().manual_seed(8)
    call = page([(make_sequence(20, (4, 2), 16, torch.float32, generator), 10, 20)], 8, generator)
    bad = [
        ("query", call.query.double(), TypeError, "query"),
        ("query", call.query[:, :3], ValueError, "query"),
        ("query", call.query[..., :8], ValueError, "query"),
        ("keys", call.keys.bfloat16(), TypeError, "keys"),
        ("keys", call.keys.transpose(1, 2), ValueError, "keys"),
        ("values", call.values[:-1], ValueError, "values"),
        ("block_table", call.block_table.long(), TypeError, "block_table"),
        ("block_table", call.block_table[:, :2], ValueError, "block_table"),
        ("block_table", torch.full_like(call.block_table, -1), IndexError, "block_table"),
        ("query_start", call.query_start[:1], ValueError, "query_start"),
        ("query_start", call.query_start + 1, ValueError, "query_start"),
        ("context_len", call.context_len - 15, ValueError, "context_len"),
        ("context_len", call.context_len.long(), TypeError, "context_len"),
    ]
    for name, value, error, message in bad:
        with pytest.raises(error, match=message):
            replace(call, **{name: value}).run()
