"""From a plan's chunks to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.contracts import ForwardContext
from quire.platform.plan import Chunk

_LEAST_LIMIT = 2048


def build(
    chunks: Sequence[Chunk], block_size: int, device: torch.device, mrope: bool = False
) -> tuple[torch.Tensor, ForwardContext]:
    """Return (token ids [T] int64, metadata) of the chunks, laid end to end; mrope: with `rotary_positions`."""
    # Plain lists: a decode step has one number for each, and a numpy call costs as much as fifty of them.
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends, lengths, prompts = [0], [], []
    for chunk in chunks:
        places = range(chunk.start, chunk.start + len(chunk.token_ids))
        token_ids += chunk.token_ids
        positions += places
        slots += [chunk.block_ids[p // block_size] * block_size + p % block_size for p in places]
        ends.append(len(token_ids))
        lengths.append(places.stop)
        prompts.append(chunk.prompt_len)
    tokens = torch.tensor([token_ids, positions, slots], dtype=torch.int64, device=device).unbind()
    context = ForwardContext(
        positions=tokens[1],
        query_start=torch.tensor(ends, dtype=torch.int32, device=device),
        context_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        prompt_len=torch.tensor(prompts, dtype=torch.int32, device=device),
        slot_mapping=tokens[2],
        block_table=_block_table(chunks).to(device),
        position_limit=max(_LEAST_LIMIT, 1 << (max(lengths) - 1).bit_length()),
        rotary_positions=_rotary_positions(chunks).to(device) if mrope else None,
    )
    return tokens[0], context


def _rotary_positions(chunks: Sequence[Chunk]) -> torch.Tensor:
    """[3, T] int64, or [T] where the three are the same for all."""
    parts = [
        np.broadcast_to(np.arange(chunk.start, chunk.start + len(chunk.token_ids)), (3, len(chunk.token_ids)))
        if chunk.rotary is None
        else chunk.rotary
        for chunk in chunks
    ]
    positions = np.concatenate(parts, axis=1)
    if (positions == positions[0]).all():
        positions = positions[0]
    return torch.from_numpy(np.ascontiguousarray(positions))


def media_rows(chunks: Sequence[Chunk]) -> tuple[list[int], list[tuple[bytes, int, int]]]:
    """(rows of the step that are placeholders, (digest, first, end) of the features that they take, in that order)."""
    rows: list[int] = []
    parts: list[tuple[bytes, int, int]] = []
    first = 0
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        for item in chunk.media:
            begin, stop = max(chunk.start, item.offset), min(end, item.end)
            rows += range(first + begin - chunk.start, first + stop - chunk.start)
            parts.append((item.digest, begin - item.offset, stop - item.offset))
        first += len(chunk.token_ids)
    return rows, parts


def _block_table(chunks: Sequence[Chunk]) -> torch.Tensor:
    table = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return torch.from_numpy(table)
