"""Sequences, how they are laid out for `paged_attention`, and what must come out of it in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from kernel_helpers import is_gpu

from quire.kernels import reference
from quire.kernels.reference_attention import quantized
from quire.types import KVCache, int8_row_bytes

HALVES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [16, 20, 24, 32, 64, 80, 96, 128, 7, 256]
# Error per unit of the values' magnitude. Half types are rounded on the way out; scores are float32. On a GPU, and of
# bfloat16 on AMX and AVX-512-BF16, the weights are rounded too.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
GPU_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
POISON_BLOCK = 1 << 30

Heads = tuple[int, int]


def tolerance(kernels: Any, dtype: torch.dtype) -> float:
    return (GPU_TOLERANCE if is_gpu(kernels) else TOLERANCE)[dtype]


def rounds_weights(kernels: Any, dtype: torch.dtype) -> bool:
    if is_gpu(kernels):
        return True
    return dtype is torch.bfloat16 and hasattr(kernels, "isa") and kernels.isa() in ("amx", "avx512")


@dataclass
class Stream:
    """One sequence's own queries, keys and values at every position, before any paging."""

    query: torch.Tensor  # [length, H, D]
    key: torch.Tensor  # [length, G, D]
    value: torch.Tensor  # [length, G, DV]


def stream(
    length: int,
    heads: Heads = (2, 1),
    dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    value_dim: int | None = None,
) -> Stream:
    generator = torch.Generator().manual_seed(seed)

    def randn(count: int, size: int = dim) -> torch.Tensor:
        return torch.randn(length, count, size, generator=generator).to(dtype)

    return Stream(randn(heads[0]), randn(heads[1]), randn(heads[1], value_dim or dim))


Chunk = tuple[Stream, int, int]  # tokens start .. end of a stream


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

    def run(self, kernels: Any) -> torch.Tensor:
        return kernels.paged_attention(
            self.query, self.keys, self.values, self.block_table, self.query_start, self.context_len, self.scale,
            **self.more,
        )  # fmt: skip


def page(
    chunks: list[Chunk],
    block_size: int = 16,
    scale: float | None = None,
    width: int = 0,
    stale: bool = False,
    apart: int = 0,
    window: int = 0,
    chunk: int = 0,
    int8: bool = False,
    **more: object,
) -> Call:
    """Lay contexts out in random blocks; all that may not be read is NaN or an absurd block id.

    int8: rows are whole numbers with a scale each. width: of the block table; 0: two blocks more than are needed.
    stale: what the table says of blocks that no token sees names blocks of NaN, and not only none. apart: so many
    columns, of NaN, follow each value.
    """
    kv_heads, dim = chunks[0][0].key.shape[1:]
    value_dim, dtype = chunks[0][0].value.shape[2], chunks[0][0].key.dtype
    needed = [-(-end // block_size) for _, _, end in chunks]
    ids = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(len(chunks))).int()
    cache = _int8_cache if int8 else _cache
    made = cache((len(ids), kv_heads, block_size), dim, value_dim, dtype, apart)
    table = torch.full((len(chunks), max(width or max(needed) + 2, *needed, 1)), POISON_BLOCK, dtype=torch.int32)
    used = 0
    for s, (own, start, end) in enumerate(chunks):
        table[s, : needed[s]] = ids[used : used + needed[s]]
        used += needed[s]
        skipped = max(0, start + 1 - window if window else 0, start - start % chunk if chunk else 0) // block_size
        position = torch.arange(skipped * block_size, end)
        slots = table[s, position // block_size].long() * block_size + position % block_size
        reference.write_kv(
            own.key[position], own.value[position], made.keys, made.values, slots, made.key_scales, made.value_scales
        )
        table[s, :skipped:3] = -1
        table[s, 1:skipped:3] = POISON_BLOCK
        if not stale:
            table[s, 2:skipped:3] = -2
    starts = [0]
    for _, start, end in chunks:
        starts.append(starts[-1] + end - start)
    query = torch.cat([own.query[start:end] for own, start, end in chunks])
    padded = torch.full((len(query), query.shape[1] + 2, dim), torch.nan, dtype=query.dtype)
    padded[:, :-2] = query  # tokens apart, as in a fused projection's output
    return Call(
        padded[:, :-2],
        made.keys,
        made.values,
        table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
        dim**-0.5 if scale is None else scale,
        more
        | ({"window": window} if window else {})
        | ({"chunk": chunk} if chunk else {})
        | ({"key_scales": made.key_scales, "value_scales": made.value_scales} if int8 else {}),
    )


def _cache(shape: tuple[int, int, int], dim: int, value_dim: int, dtype: torch.dtype, apart: int) -> KVCache:
    values = torch.full((*shape, value_dim + apart), torch.nan, dtype=dtype)
    return KVCache(torch.full((*shape, dim), torch.nan, dtype=dtype), values[..., :value_dim])


def _int8_cache(shape: tuple[int, int, int], dim: int, value_dim: int, dtype: torch.dtype, apart: int) -> KVCache:
    """Of ones in all bits, which make a scale of NaN."""
    sizes = int8_row_bytes(dim), int8_row_bytes(value_dim) + 4 * apart
    keys, values = (torch.full((*shape, size), -1, dtype=torch.int8) for size in sizes)
    return KVCache.of_rows(keys, values, dim, value_dim)


def as_stored(own: Stream) -> Stream:
    """What int8 leaves of keys and values."""
    key, value = (scales * whole for whole, scales in map(quantized, (own.key, own.value)))
    return replace(own, key=key, value=value)


def exact(
    own: Stream,
    start: int,
    end: int,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    head_scales: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
    chunk: int = 0,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chunk's attention in float64: [end - start, H, DV]. visible_end: of the chunk's tokens."""
    group = own.query.shape[1] // own.key.shape[1]
    q = own.query[start:end].double().transpose(0, 1)
    k = own.key[:end].double().transpose(0, 1).repeat_interleave(group, 0)
    v = own.value[:end].double().transpose(0, 1).repeat_interleave(group, 0)
    distance = torch.arange(start, end)[:, None] - torch.arange(end)
    scores = q @ k.transpose(1, 2) * scale
    if head_scales is not None:
        scores *= head_scales.double()[:, None, None]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores -= slopes.double()[:, None, None] * distance
    if biases is not None:
        reach = biases.shape[1] // 2
        scores += biases.double()[:, (-distance).clamp(-reach, reach) + reach]
    later = distance < 0 if visible_end is None else torch.arange(end) >= visible_end[:, None]
    earlier = torch.arange(start, end)[:, None] // chunk > torch.arange(end) // chunk if chunk else distance >= end
    scores.masked_fill_(later | earlier | (distance >= (window or end)), -torch.inf)
    if sinks is not None:  # a key of its own, whose value is 0
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, end - start, 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def check(
    kernels: Any,
    chunks: list[Chunk],
    block_size: int = 16,
    scale: float | None = None,
    stale: bool = False,
    apart: int = 0,
    visible_end: torch.Tensor | None = None,
    int8: bool = False,
    **more: Any,
) -> None:
    """Close to float64; int8: of what that leaves of keys and values."""
    ends = {} if visible_end is None else {"visible_end": visible_end}
    call = page(chunks, block_size, scale, stale=stale, apart=apart, int8=int8, **more, **ends)
    out = call.run(kernels)
    assert out.is_contiguous() and out.dtype is call.query.dtype
    expected, first = [], 0
    for own, start, end in chunks:
        last = first + end - start
        mine = None if visible_end is None else visible_end[first:last]
        kept = as_stored(own) if int8 else own
        expected.append(exact(kept, start, end, call.scale, visible_end=mine, **more))
        first = last
    wanted = torch.cat(expected)
    error = (out.double() - wanted).abs() / (1 + wanted.abs())
    assert error.max() <= tolerance(kernels, out.dtype), f"{error.max():.2e}"
