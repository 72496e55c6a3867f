"""The GPU's paged attention against float64, and its promise: a token's bits do not depend on its company."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from types import ModuleType

import pytest
import torch

from tests.kernels.kernel_helpers import same_bits

HALVES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [16, 20, 64, 80, 96, 128, 7, 256]
# Error per unit of the values' magnitude: half types are rounded on the way out, and so are the weights.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
POISON_BLOCK = 1 << 30

Heads = tuple[int, int]


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """The oracle's products are small."""


@dataclass
class Stream:
    """One sequence's own queries, keys and values at every position, before any paging."""

    query: torch.Tensor  # [length, H, D]
    key: torch.Tensor  # [length, G, D]
    value: torch.Tensor


def stream(
    length: int, heads: Heads = (2, 1), dim: int = 16, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Stream:
    generator = torch.Generator().manual_seed(seed)

    def randn(count: int) -> torch.Tensor:
        return torch.randn(length, count, dim, generator=generator).to(dtype)

    return Stream(randn(heads[0]), randn(heads[1]), randn(heads[1]))


@dataclass
class Call:
    """Arguments of one `paged_attention`."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    scale: float
    more: dict[str, object] = field(default_factory=dict)

    def run(self, cuda: ModuleType) -> torch.Tensor:
        return cuda.paged_attention(
            self.query, self.keys, self.values, self.block_table, self.query_start, self.context_len, self.scale,
            **self.more,
        )  # fmt: skip


Chunk = tuple[Stream, int, int]


def page(chunks: list[Chunk], block_size: int = 16, scale: float | None = None, width: int = 0, **more: object) -> Call:
    """Lay contexts out in random blocks; all that may not be read is NaN or an absurd block id."""
    kv_heads, dim = chunks[0][0].key.shape[1:]
    needed = [-(-end // block_size) for _, _, end in chunks]
    ids = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(len(chunks))).int()
    keys = torch.full((len(ids), kv_heads, block_size, dim), torch.nan, dtype=chunks[0][0].key.dtype)
    values = keys.clone()
    table = torch.full((len(chunks), max(width, *needed, 1)), POISON_BLOCK, dtype=torch.int32)
    used = 0
    for s, (own, _, end) in enumerate(chunks):
        table[s, : needed[s]] = ids[used : used + needed[s]]
        used += needed[s]
        position = torch.arange(end)
        block, offset = table[s, position // block_size].long(), position % block_size
        keys[block, :, offset] = own.key[:end]
        values[block, :, offset] = own.value[:end]
    starts = [0]
    for _, start, end in chunks:
        starts.append(starts[-1] + end - start)
    query = torch.cat([own.query[start:end] for own, start, end in chunks])
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
        more,
    )


def exact(
    own: Stream, start: int, end: int, scale: float, window: int = 0, slopes: torch.Tensor | None = None
) -> torch.Tensor:
    """The chunk's attention in float64: [end - start, H, D]."""
    group = own.query.shape[1] // own.key.shape[1]
    q = own.query[start:end].double().transpose(0, 1)
    k = own.key[:end].double().transpose(0, 1).repeat_interleave(group, 0)
    v = own.value[:end].double().transpose(0, 1).repeat_interleave(group, 0)
    distance = torch.arange(start, end)[:, None] - torch.arange(end)
    scores = q @ k.transpose(1, 2) * scale
    if slopes is not None:
        scores -= slopes.double()[:, None, None] * distance
    scores.masked_fill_((distance < 0) | (distance >= (window or end)), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check(
    cuda: ModuleType, chunks: list[Chunk], block_size: int = 16, scale: float | None = None, **more: object
) -> None:
    call = page(chunks, block_size, scale, **more)
    out = call.run(cuda)
    assert out.is_contiguous() and out.dtype is call.query.dtype
    expected = torch.cat([exact(own, start, end, call.scale, **more) for own, start, end in chunks])
    error = (out.double() - expected).abs() / (1 + expected.abs())
    assert error.max() <= TOLERANCE[out.dtype], f"{error.max():.2e}"


def test_mixed_batches(cuda: ModuleType, dtype: torch.dtype, order: int) -> None:
    chunks = [
        (stream(end, (4, 2), 64, dtype, seed=end), start, end)
        for start, end in [(0, 1), (40, 41), (0, 67), (100, 131), (129, 130), (60, 64)]
    ]
    check(cuda, chunks, 8)


@pytest.mark.parametrize("dim", [64, 256])
def test_pipelines_in_every_order(cuda: ModuleType, dim: int, order: int) -> None:
    own = stream(580, (1, 1), dim)
    check(cuda, [(own, 579, 580), (own, 570, 580), (own, 100, 101)])


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_size(cuda: ModuleType, dim: int, dtype: torch.dtype) -> None:
    chunks = [
        (stream(end, (2, 1), dim, dtype, seed=end), start, end) for start, end in [(66, 67), (0, 66), (0, 1), (80, 82)]
    ]
    check(cuda, chunks, 8)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (14, 2), (9, 1), (16, 1), (20, 1), (40, 2)])
def test_groups_of_heads(cuda: ModuleType, heads: Heads) -> None:
    chunks = [(stream(end, heads, 16, seed=end), start, end) for start, end in [(69, 70), (10, 20), (0, 3), (0, 1)]]
    check(cuda, chunks)


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 100])
@pytest.mark.parametrize("dtype", HALVES)
def test_block_sizes_and_edges_of_tiles_and_spans(cuda: ModuleType, block_size: int, dtype: torch.dtype) -> None:
    own = stream(1100, (2, 1), 16, dtype)
    ends = [1, 2, 63, 64, 65, 128, 511, 512, 513, 1024, 1025, 1100]
    check(cuda, [(own, end - 1, end) for end in ends], block_size)
    check(cuda, [(own, end - 2, end) for end in ends[1:]], block_size)


def test_float32_over_long_contexts(cuda: ModuleType) -> None:
    own = stream(1100, (2, 1), 16, torch.float32)
    check(cuda, [(own, 1099, 1100), (own, 511, 514), (own, 0, 40)], 5)


@pytest.mark.parametrize("window", [1, 20, 64, 100, 600])
def test_windows(cuda: ModuleType, window: int, dtype: torch.dtype) -> None:
    own = stream(1100, (2, 1), 16, dtype)
    check(cuda, [(own, 1099, 1100), (own, 1060, 1100), (own, 10, 30), (own, 0, 1), (own, 520, 521)], window=window)


def test_alibi(cuda: ModuleType, dtype: torch.dtype) -> None:
    own = stream(700, (4, 2), 64, dtype)
    slopes = torch.tensor([0.5, 0.01, 0.0, 0.25])
    chunks = [(own, 699, 700), (own, 660, 700), (own, 0, 20), (own, 0, 1)]
    check(cuda, chunks, slopes=slopes)
    check(cuda, chunks, slopes=slopes, window=70)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [
        ((3, 1), 64, torch.float16),
        ((2, 2), 20, torch.bfloat16),
        ((2, 1), 128, torch.bfloat16),
        ((1, 1), 256, torch.bfloat16),
        ((2, 1), 7, torch.float32),
    ],
)
def test_bits_do_not_depend_on_company(cuda: ModuleType, heads: Heads, dim: int, dtype: torch.dtype) -> None:
    length = 140
    subject = stream(length, heads, dim, dtype)
    others = [stream(70, heads, dim, dtype, seed=1 + i) for i in range(3)]
    whole = page([(subject, 0, length)]).run(cuda)
    some = [0, 1, 15, 62, 63, 64, 65, 100, 127, 128, 139]
    every = [(subject, position, position + 1) for position in some]
    assert same_bits(page(every).run(cuda), whole[some])
    assert same_bits(page(every[4:5], 5, width=200).run(cuda)[0], whole[63])
    for cuts in [(0, 2, 4, 17, 62, 64, 128, 140), (0, 70, 140)]:
        parts = [page([(subject, a, b)], 8).run(cuda) for a, b in itertools.pairwise(cuts)]
        assert same_bits(torch.cat(parts), whole), cuts
    for start, end, block_size in [(0, 50, 1), (50, 51, 4), (51, 140, 32)]:
        crowd = [(others[0], 69, 70), (others[1], 0, 30), (subject, start, end), (others[2], 30, 57)]
        out = page(crowd, block_size).run(cuda)
        assert same_bits(out[31 : 31 + end - start], whole[start:end]), (start, end)


@pytest.mark.parametrize(
    "more", [{}, {"window": 300}, {"window": 30}, {"slopes": torch.tensor([0.003, 0.2])}],
    ids=["plain", "window-300", "window-30", "alibi"],
)  # fmt: skip
def test_bits_over_several_spans(cuda: ModuleType, more: dict[str, object]) -> None:
    subject = stream(1100, (2, 1), 16)
    chunks = [(490, 580), (1000, 1040), (1060, 1100)]
    for start, end in chunks:
        whole = page([(subject, start, end)], **more).run(cuda)
        some = [i for i in (490, 511, 512, 513, 575, 576, 1023, 1024, 1025, 1099) if start <= i < end]
        alone = page([(subject, i, i + 1) for i in some], **more).run(cuda)
        assert same_bits(alone, whole[[i - start for i in some]])
        parts = [page([(subject, a, b)], 64, **more).run(cuda) for a, b in [(start, start + 23), (start + 23, end)]]
        assert same_bits(torch.cat(parts), whole)
    assert same_bits(page([(subject, 1099, 1100)], 7, width=900, **more).run(cuda)[0], whole[-1])


def test_a_cache_too_wide_for_partial_results(cuda: ModuleType) -> None:
    """A block of threads then goes over all of a sequence's spans itself."""
    subject = stream(1100, (2, 1), 16)
    chunks = [(subject, 1099, 1100), (subject, 512, 513)]
    assert cuda._cuda.attention_workspace(2, 2, 16, 1, 16, 69, 2, 1) > 0
    assert cuda._cuda.attention_workspace(2, 2, 16, 1, 1 << 15, 1 << 15, 2, 1) == 0
    wide = page(chunks, 1 << 15, width=1 << 15)
    assert same_bits(wide.run(cuda), page(chunks).run(cuda))


def test_large_prefills(cuda: ModuleType) -> None:
    """Tiles of 128 rows make the bits of those of 64."""
    heads = (64, 8)
    chunks = [(stream(end, heads, 16, seed=end), start, end) for start, end in [(0, 90), (45, 130), (50, 70)]]
    tokens = sum(end - start for _, start, end in chunks)
    assert tokens * 8 // 128 * 8 >= 96
    out = page(chunks).run(cuda)
    parts = []
    for own, start, end in chunks:
        parts += [page([(own, i, min(i + 40, end))]).run(cuda) for i in range(start, end, 40)]
    assert same_bits(torch.cat(parts), out)
    check(cuda, chunks)


def test_many_sequences(cuda: ModuleType) -> None:
    """More than a warp can count at once."""
    lengths = [1 + i % 3 for i in range(70)]
    check(cuda, [(stream(40 + n, seed=i), 40, 40 + n) for i, n in enumerate(lengths)], 8)


def test_later_tokens_of_a_chunk_cannot_reach_earlier_ones(cuda: ModuleType, dtype: torch.dtype) -> None:
    clean = stream(80, (4, 2), 64, dtype)
    spoilt = replace(clean, key=clean.key.clone())
    spoilt.key[70:] = torch.nan
    a, b = (page([(own, 0, 80)]).run(cuda) for own in (clean, spoilt))
    assert same_bits(a[:70], b[:70])
    assert b[70:].isnan().all()
    assert page([(spoilt, 79, 80)]).run(cuda).isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_great_values_of_later_tokens_change_nothing(cuda: ModuleType, dtype: torch.dtype) -> None:
    """A weight of 0 takes part in a product's sum: it must not cost small ones their last bits."""
    small = stream(150, (2, 1), 64, dtype)
    small.value *= 2.0**-12
    great = replace(small, value=small.value.clone())
    great.value[70:] *= 2.0**22
    out = page([(great, 0, 150)]).run(cuda)
    assert same_bits(out[:70], page([(small, 0, 150)]).run(cuda)[:70])
    alone = page([(great, i, i + 1) for i in (0, 5, 40, 63, 64, 69)]).run(cuda)
    assert same_bits(alone, out[[0, 5, 40, 63, 64, 69]])


def test_great_scores_do_not_overflow(cuda: ModuleType, dtype: torch.dtype) -> None:
    own = stream(150, (4, 2), 64, dtype)
    own.query *= 300
    for chunk in [(own, 0, 150), (own, 149, 150)]:
        call = page([chunk], scale=10.0)
        out = call.run(cuda)
        # Scores of some 1e5 have an ulp of 1e-2 in float32, so weights are only that certain.
        assert (out.double() - exact(*chunk, 10.0)).abs().max() < 0.1
        for scale in (-1e30, 0.0, -0.125):
            out = page([chunk], scale=scale).run(cuda)
            assert out.isfinite().all()
        own_error = (out.double() - exact(*chunk, -0.125)).abs().max()
        assert own_error < 0.1


def test_zero_scale_is_the_mean(cuda: ModuleType, dtype: torch.dtype) -> None:
    own = stream(70, dtype=dtype)
    for chunk in [(own, 60, 70), (own, 69, 70)]:
        check(cuda, [chunk], scale=0.0)


def test_padding_rows_are_zero(cuda: ModuleType, dtype: torch.dtype) -> None:
    """A CUDA graph's batch is filled up with sequences of one token and no context."""
    own = stream(600, (20, 1), 20, dtype)
    call = page([(own, 599, 600), (own, 99, 100), (own, 9, 10)])
    alone = page([(own, 599, 600)]).run(cuda)
    call.context_len[1:] = 0
    call.block_table[1:] = -1
    out = call.run(cuda)
    assert same_bits(out[:1], alone)
    assert (out[1:] == 0).all()


def test_tokens_before_the_context_are_zero(cuda: ModuleType, dtype: torch.dtype) -> None:
    own = stream(100, (2, 1), 64, dtype)
    call = page([(own, 10, 30), (own, 0, 9), (own, 98, 99)])
    call.context_len[0], call.context_len[1] = 5, 0
    call.block_table[1] = -1
    out = call.run(cuda)
    assert (out[:15] == 0).all() and (out[20:29] == 0).all()
    assert same_bits(out[15:20], page([(replace(own, query=own.query[25:30]), 0, 5)]).run(cuda))


def test_block_ids_that_point_nowhere(cuda: ModuleType, dtype: torch.dtype) -> None:
    own = stream(100, (2, 1), 64, dtype)
    for chunk in [(own, 99, 100), (own, 60, 100)]:
        call = page([chunk])
        for block in (-1, 1 << 30, len(call.keys)):
            call.block_table[0, 2] = block
            assert call.run(cuda).isfinite().all()
        call = replace(page([chunk]), context_len=torch.tensor([1 << 30], dtype=torch.int32))
        call.keys.nan_to_num_(), call.values.nan_to_num_()  # all that the table has room for
        assert call.run(cuda).isfinite().all()


@pytest.mark.parametrize("dim", [64, 7])
def test_any_address(cuda: ModuleType, dim: int, dtype: torch.dtype) -> None:
    """Rows that cannot be read 16 bytes at a time, whatever the head size."""
    own = stream(80, (2, 1), dim, dtype)
    for chunk in [(own, 79, 80), (own, 30, 80)]:
        call = page([chunk])
        moved = torch.full((call.keys.numel() + 1,), torch.nan, dtype=dtype)[1:].view_as(call.keys)
        moved.copy_(call.keys)
        assert same_bits(replace(call, keys=moved).run(cuda), call.run(cuda))


def test_nothing_to_do(cuda: ModuleType) -> None:
    assert page([(stream(5), 5, 5)]).run(cuda).shape == (0, 2, 16)


def test_what_cannot_be_served_is_said(cuda: ModuleType, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="257"):
        page([(stream(3, dim=257, dtype=dtype), 2, 3)]).run(cuda)
    with pytest.raises(ValueError, match="heads"):
        cuda._cuda.attention_workspace(1, 3, 16, 2, 16, 1, 1, 1)
