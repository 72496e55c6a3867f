"""Runs a quire model by hand: one sequence, cut into chunks, in a pool whose blocks lie in no order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from quire.models.base import CausalLM
from quire.platform.execution.kv_tensors import allocate_cache, poison
from quire.types import ForwardContext, KVCache, StateCache


def logits(
    model: CausalLM,
    ids: Sequence[int],
    chunks: Sequence[int] | None = None,
    prompt_len: int | None = None,
    block_size: int = 4,
) -> torch.Tensor:
    """Return the scores [len(ids), vocabulary] of every token; `chunks`: the steps' sizes (all at once)."""
    caches, table = pool(model, len(ids), block_size)
    start, parts = 0, []
    for size in chunks or [len(ids)]:
        ctx = context(table, start, size, prompt_len or len(ids), block_size)
        with torch.inference_mode():
            hidden = model(model.embed(torch.tensor(ids[start : start + size])), ctx, caches)
            parts.append(model.logits(hidden))
        start += size
    assert start == len(ids)
    return torch.cat(parts)


def pool(model: CausalLM, tokens: int, block_size: int) -> tuple[list[KVCache | StateCache], torch.Tensor]:
    """A pool poisoned with NaN, and the block table [1, B] of a sequence whose blocks are scattered."""
    blocks = -(-tokens // block_size)
    dtype, size = model.dtype, 2 * blocks + 1
    spec = dataclasses.replace(model.kv_spec, windows=())  # one group, which keeps all
    caches = allocate_cache(spec, size, block_size, dtype, torch.device("cpu"), size if spec.state else 0)
    poison(caches)
    # States stand in blocks of the same numbers, in tensors of their own.
    caches = [dataclasses.replace(cache, group=0) for cache in caches]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))[:blocks]
    return caches, order.to(torch.int32).unsqueeze(0)


def context(table: torch.Tensor, start: int, size: int, prompt_len: int, block_size: int) -> ForwardContext:
    positions = torch.arange(start, start + size)
    return ForwardContext(
        positions=positions,
        query_start=torch.tensor([0, size], dtype=torch.int32),
        context_len=torch.tensor([start + size], dtype=torch.int32),
        prompt_len=torch.tensor([prompt_len], dtype=torch.int32),
        slot_mapping=table[0, positions // block_size].long() * block_size + positions % block_size,
        block_table=table,
        position_limit=2048,
        longest=max(start + size, prompt_len),
    )
