"""From a plan's chunks to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from quire.kernels import transfer
from quire.platform.execution.sequences import WorkerSequence
from quire.platform.execution.staging import Packed, Staging
from quire.platform.kv.windows import first_place
from quire.platform.scheduling.plan import Chunk
from quire.types import ForwardContext, WholePrompts

_LEAST_LIMIT = 2048
_OTHERS = ("position_limit", "longest", "whole_prompts")  # of the context's fields: what is no tensor
_NAMES = [field.name for field in fields(ForwardContext) if field.name not in _OTHERS]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a forward pass reads. token_ids: [T] int64. packed: the memory of all of it, where it was sent to a GPU.
    made_of: what `arrays` returns, where it is known."""

    token_ids: torch.Tensor
    context: ForwardContext
    packed: Packed | None = None
    made_of: Sequence[np.ndarray] | None = None

    def clone(self) -> StepInputs:
        """The same in memory of its own, at addresses that stay."""
        if self.packed is not None:
            return _of_packed(self.packed.clone(), self.context.position_limit, self.context.longest)
        own: dict[str, Any] = {name: tensor.clone() for name, tensor in tensors(self.context).items()}
        return StepInputs(self.token_ids.clone(), replace(self.context, **own))

    def arrays(self) -> list[np.ndarray]:
        """The memory of all tensors, on a CPU; which these are depends on the model alone."""
        if self.made_of is not None:
            return list(self.made_of)
        return [tensor.numpy() for tensor in (self.token_ids, *tensors(self.context).values())]


def tensors(context: ForwardContext) -> dict[str, torch.Tensor]:
    """Its tensors by name; whether one is None depends on the model alone."""
    found = {name: getattr(context, name) for name in _NAMES}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def build(
    chunks: Sequence[Chunk],
    sequences: Sequence[WorkerSequence],
    block_size: int,
    mrope: bool = False,
) -> StepInputs:
    """The chunks, laid end to end, on the CPU. sequences: of each chunk; mrope: with `rotary_positions`."""
    # Plain lists: a decode step has one number for each, and a numpy call costs as much as fifty of them.
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends, lengths = [0], []
    for chunk, sequence in zip(chunks, sequences, strict=True):
        start, length, drafts, blocks = chunk.start, chunk.length, chunk.drafts, sequence.block_ids
        end = start + length
        if length == 1 and not drafts:
            token_ids.append(sequence.token_ids[start])
            positions.append(start)
            slots.append(blocks[start // block_size] * block_size + start % block_size)
        else:
            places = range(start, end)
            token_ids += sequence.token_ids[start : end - len(drafts)]
            token_ids += drafts
            positions += places
            slots += [blocks[p // block_size] * block_size + p % block_size for p in places]
        ends.append(len(token_ids))
        lengths.append(end)
    prompts = [sequence.prompt_len for sequence in sequences]
    of_tokens = np.array([token_ids, positions, slots], np.int64)
    of_sequences = np.array([lengths, prompts], np.int32)
    # token_ids, and then the context's tensors in the order of its fields.
    arrays = [*of_tokens[:2], np.array(ends, np.int32), *of_sequences, of_tokens[2], _block_table(sequences)]
    if mrope:
        arrays.append(_rotary_positions(chunks, sequences))
    made = [torch.from_numpy(array) for array in arrays]
    context = ForwardContext(
        positions=made[1],
        query_start=made[2],
        context_len=made[3],
        prompt_len=made[4],
        slot_mapping=made[5],
        block_table=made[6],
        position_limit=limit_of(max(lengths)),
        longest=max(*lengths, *prompts),
        rotary_positions=made[7] if mrope else None,
    )
    return StepInputs(made[0], context, made_of=arrays)


def send(
    chunks: Sequence[Chunk],
    sequences: Sequence[WorkerSequence],
    block_size: int,
    staging: Staging,
    mrope: bool = False,
    rows: int = 0,
    width: int = 0,
    windows: Sequence[int] = (0,),
) -> StepInputs:
    """The same by way of pinned memory, in one copy.

    rows, width: of the block table at least. Sequences without blocks, of one token that nobody reads, fill it up.
    windows: of each group of layers.
    """
    arrays = _lay_out(chunks, sequences, block_size, windows, mrope, rows, width)
    return _of_packed(staging.send(arrays), *_limits(arrays))


def build_groups(
    chunks: Sequence[Chunk],
    sequences: Sequence[WorkerSequence],
    block_size: int,
    windows: Sequence[int],
    mrope: bool = False,
) -> StepInputs:
    """What `build` does, on a CPU, for a model whose layers form several groups, of these windows."""
    arrays = _lay_out(chunks, sequences, block_size, windows, mrope)
    named: dict[str, Any] = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    token_ids = named.pop("token_ids")
    limit, longest = _limits(arrays)
    return StepInputs(token_ids, ForwardContext(position_limit=limit, longest=longest, **named))


def _lay_out(
    chunks: Sequence[Chunk],
    sequences: Sequence[WorkerSequence],
    block_size: int,
    windows: Sequence[int],
    mrope: bool,
    rows: int = 0,
    width: int = 0,
) -> dict[str, np.ndarray]:
    """The tensors of the context by name, and `token_ids`."""
    spare = max(0, rows - len(chunks))
    counts = [chunk.length for chunk in chunks]
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    tables = _block_tables(chunks, sequences, block_size, windows, len(chunks) + spare, width)
    token_ids = [
        np.array([*sequence.token_ids[chunk.start : chunk.known_end], *chunk.drafts], np.int64)
        for chunk, sequence in zip(chunks, sequences, strict=True)
    ]
    prompts = [sequence.prompt_len for sequence in sequences]
    ends = np.cumsum([0, *counts, *[1] * spare], dtype=np.int32)
    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(len(owner)) - ends[owner] + starts[owner]
    slots = tables[:, owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    padding = np.zeros(spare, np.int64)
    no_slots = np.full((len(windows), spare), -1)  # their keys are not written
    slots = np.concatenate([slots, no_slots], axis=1)
    arrays = {
        "token_ids": np.concatenate([*token_ids, padding]),
        "positions": np.concatenate([positions, padding]),
        "slot_mapping": slots[0],
        "query_start": ends,
        "context_len": np.concatenate([starts + counts, padding]).astype(np.int32),
        "prompt_len": np.concatenate([prompts, padding]).astype(np.int32),
        "block_table": tables[0],
    }
    if len(windows) > 1:
        arrays |= {"group_slots": slots[1:], "group_tables": tables[1:]}
    if mrope:
        rotary = _rotary_positions(chunks, sequences)
        arrays["rotary_positions"] = np.pad(rotary, [*[(0, 0)] * (rotary.ndim - 1), (0, spare)])
    return arrays


def _block_tables(
    chunks: Sequence[Chunk],
    sequences: Sequence[WorkerSequence],
    block_size: int,
    windows: Sequence[int],
    rows: int,
    width: int,
) -> np.ndarray:
    """[G, rows, B] int32, B at least `width`. Of groups with a window, the blocks that the chunks read and write."""
    count = len(windows)
    tables = np.zeros((count, rows, max(width, *(len(s.block_ids) // count for s in sequences))), np.int32)
    for group, window in enumerate(windows):
        in_part = window > 0 or count > 1
        for row, chunk, sequence in zip(tables[group], chunks, sequences, strict=False):
            first, blocks = 0, sequence.block_ids
            if in_part:
                first = first_place(window, chunk.start, block_size)
                blocks = blocks[first * count + group :: count]
            row[first : first + len(blocks)] = blocks
    return tables


def _limits(arrays: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """(position_limit, longest) of the context."""
    length = int(arrays["context_len"].max())
    return limit_of(length), max(length, int(arrays["prompt_len"].max()))


def _of_packed(packed: Packed, position_limit: int, longest: int) -> StepInputs:
    named: dict[str, Any] = {name: packed.tensor(name) for name in packed.places}
    token_ids = named.pop("token_ids")
    return StepInputs(token_ids, ForwardContext(position_limit=position_limit, longest=longest, **named), packed)


def limit_of(length: int) -> int:
    """A power of two that bounds the positions of `length` tokens."""
    return max(_LEAST_LIMIT, 1 << (length - 1).bit_length())


def _rotary_positions(chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]) -> np.ndarray:
    """[3, T] int64, or [T] where the three are the same for all."""
    parts = [
        np.broadcast_to(np.arange(chunk.start, chunk.end), (3, chunk.length))
        if sequence.rotary is None
        else sequence.rotary.between(chunk.start, chunk.end)
        for chunk, sequence in zip(chunks, sequences, strict=True)
    ]
    positions = np.concatenate(parts, axis=1)
    if (positions == positions[0]).all():
        positions = positions[0]
    return np.ascontiguousarray(positions)


def media_rows(
    chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]
) -> tuple[list[int], list[tuple[bytes, int, int]]]:
    """(rows of the step that take features, (digest, first, end) of the features that they take, in that order)."""
    rows: list[int] = []
    parts: list[tuple[bytes, int, int]] = []
    first = 0
    for chunk, sequence in zip(chunks, sequences, strict=True):
        for item in sequence.media_in(chunk.start, chunk.end):
            begin, stop = max(chunk.start, item.offset), min(chunk.end, item.end)
            places, first_feature, end_feature = item.features_between(begin, stop)
            rows += [first + place - chunk.start for place in places]
            parts.append((item.digest, first_feature, end_feature))
        first += chunk.length
    return rows, parts


def visible_ends(chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]) -> np.ndarray | None:
    """`visible_end` of the step, [T] int32. None: no token sees a later one."""
    if not any(sequence.sees for sequence in sequences):
        return None
    parts: list[np.ndarray] = []
    later = False
    for chunk, sequence in zip(chunks, sequences, strict=True):
        ends = np.arange(chunk.start + 1, chunk.end + 1, dtype=np.int32)
        for start, end in sequence.sees:
            if start < chunk.end and chunk.start < end:
                if start < chunk.start or chunk.end < end:
                    raise AssertionError(f"tokens {start} .. {end} see one another, and a chunk cuts them")
                ends[start - chunk.start : end - chunk.start] = end
                later = True
        parts.append(ends)
    return np.concatenate(parts) if later else None


def token_types(chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]) -> torch.Tensor:
    """`token_types` of the step, [T] int64: 1 of tokens of a second text, else 0."""
    parts = []
    for chunk, sequence in zip(chunks, sequences, strict=True):
        second = sequence.pooling.second if sequence.pooling is not None else 0
        parts.append(np.arange(chunk.start, chunk.end) >= (second or sequence.prompt_len))
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def position_rows(
    chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence], padding: int | None
) -> torch.Tensor | None:
    """`position_rows` of a step of whole prompts, [T] int64: padding's is its id, those of others follow it, and are
    counted without padding. None: there is none, or it is no token."""
    if padding is None or not any(padding in one.token_ids for one in sequences):
        return None
    parts = []
    for chunk, sequence in zip(chunks, sequences, strict=True):
        kept = np.array(sequence.token_ids[: chunk.end]) != padding
        parts.append(np.cumsum(kept) * kept + padding)
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def whole_prompts(
    chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence], window: int, device: torch.device
) -> WholePrompts | None:
    """Those of the step's prompts that see all of themselves and are longer than the window. None: there are none."""
    rows: list[np.ndarray] = []
    whose: list[int] = []
    lengths: list[int] = []
    first = 0
    for place, (chunk, sequence) in enumerate(zip(chunks, sequences, strict=True)):
        for start, end in sequence.sees:
            if start == chunk.start == 0 and end > window:
                rows.append(np.arange(first, first + end))
                whose.append(place)
                lengths.append(end)
        first += chunk.length
    if not rows:
        return None
    counts = np.array(lengths, dtype=np.int32)
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    parts = (np.concatenate(rows), np.array(whose), starts, counts, np.repeat(counts, counts))
    return WholePrompts(*(transfer.send(torch.from_numpy(part), device) for part in parts))


def _block_table(sequences: Sequence[WorkerSequence]) -> np.ndarray:
    """[S, B] int32."""
    table = np.zeros((len(sequences), max(len(sequence.block_ids) for sequence in sequences)), dtype=np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.block_ids)] = sequence.block_ids
    return table
