"""From a plan's chunks to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.contracts import ForwardContext
from quire.platform.plan import Chunk

_LEAST_LIMIT = 2048


def build(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> tuple[torch.Tensor, ForwardContext]:
    """Return (token ids [T] int64, metadata) of the chunks, laid end to end."""
    counts = np.array([len(chunk.token_ids) for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
    block_table = _block_table(chunks)

    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(len(token_ids)) - query_start[owner] + starts[owner]
    block = block_table[owner, positions // block_size].astype(np.int64)
    context = ForwardContext(
        positions=_tensor(positions, device),
        query_start=_tensor(query_start, device),
        context_len=_tensor((starts + counts).astype(np.int32), device),
        prompt_len=_tensor(np.array([c.prompt_len for c in chunks], dtype=np.int32), device),
        slot_mapping=_tensor(block * block_size + positions % block_size, device),
        block_table=_tensor(block_table, device),
        position_limit=max(_LEAST_LIMIT, 1 << int(positions.max()).bit_length()),
    )
    return _tensor(token_ids, device), context


def _block_table(chunks: Sequence[Chunk]) -> np.ndarray:
    table = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return table


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
