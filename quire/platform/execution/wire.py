"""Between the processes of the engine and of a worker: results and errors as bytes, tensors as bytes or in memory."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from quire.platform.sampling.results import Sampled
from quire.platform.scheduling.plan import Chunk, StepPlan, StepResult

_ALIGNMENT = 64  # bytes
_MARK = b"f"  # what goes with a file's descriptor

# (name, offset in bytes, shape, dtype) of each tensor in a piece of memory
Layout = tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]


def pack(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Only of what the engine's process and its own worker have written."""
    return pickle.loads(data)


def pack_plan(plan: StepPlan) -> tuple[Any, ...]:
    """Its chunks as plain tuples, which pickle in a third of the time."""
    return tuple(map(tuple, plan.chunks)), replace(plan, chunks=())


def unpack_plan(rows: tuple[Any, ...], rest: StepPlan) -> StepPlan:
    """What `pack_plan` was given."""
    return replace(rest, chunks=tuple(map(Chunk._make, rows)))


def pack_result(result: StepResult) -> tuple[Any, ...]:
    """Most tokens come alone: their numbers travel, and the objects are made over there."""
    drawn = [one for chunk in result.sampled for one in chunk]
    special = {place: one for place, one in enumerate(drawn) if one != Sampled(one.token_id)}
    counts = [len(chunk) for chunk in result.sampled]
    return (
        [one.token_id for one in drawn],
        counts,
        special,
        result.scores if any(result.scores) else None,
        result.pooled,
    )


def unpack_result(packed: tuple[Any, ...], plan: StepPlan) -> StepResult:
    """plan: what gave the result."""
    tokens, counts, special, scores, pooled = packed
    drawn = iter([special.get(place) or Sampled(token) for place, token in enumerate(tokens)])
    sampled = tuple(tuple(islice(drawn, count)) for count in counts)
    return StepResult(sampled, scores or ((),) * len(plan.chunks), pooled)


def pack_error(error: BaseException) -> bytes:
    """An exception as it was, with its traceback as a note; one that does not pickle as a RuntimeError."""
    error.add_note("In the worker's process:\n" + "".join(traceback.format_exception(error)))
    try:
        data = pack(error)
        if type(unpack(data)) is type(error):
            return data
    except Exception:  # one that wants other arguments, or holds what cannot travel
        pass
    return pack(RuntimeError(f"{type(error).__name__}: {error}"))


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, bytes]:
    """What `tensors_in` takes."""
    layout, size = _laid_out(tensors)
    data = bytearray(size)
    _write(data, layout, tensors)
    return layout, bytes(data)


def send_tensors(channel: socket.socket, tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, int]:
    """Send tensors of this process's memory by way of memory that both processes map. What `receive_tensors` takes is
    returned: (layout, bytes)."""
    layout, size = _laid_out(tensors)
    with _anonymous_file() as file:
        os.ftruncate(file.fileno(), max(size, 1))
        with mmap.mmap(file.fileno(), max(size, 1)) as memory:
            _write(memory, layout, tensors)
        socket.send_fds(channel, [_MARK], [file.fileno()])
    return layout, size


def _laid_out(tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, int]:
    """Where each of them goes, and how many bytes that is in all."""
    layout, size = [], 0
    for name, tensor in tensors.items():
        layout.append((name, size, tuple(tensor.shape), tensor.dtype))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(layout), size


def _write(memory: mmap.mmap | bytearray, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    for (_, offset, _, _), tensor in zip(layout, tensors.values(), strict=True):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        memory[offset : offset + tensor.nbytes] = data.tobytes()


def receive_tensors(channel: socket.socket, layout: Layout, size: int) -> dict[str, torch.Tensor]:
    """The tensors that were sent. Their memory goes with the last of them."""
    _, (descriptor,), _, _ = socket.recv_fds(channel, len(_MARK), 1)
    try:
        memory = mmap.mmap(descriptor, max(size, 1))
    finally:
        os.close(descriptor)
    return tensors_in(memory, layout)


def tensors_in(memory: mmap.mmap | bytearray, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors that lie there, which keep it."""
    tensors = {}
    for name, offset, shape, dtype in layout:
        count = torch.Size(shape).numel() * dtype.itemsize
        if not count:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        data = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset)
        tensors[name] = data.view(dtype).view(shape)
    return tensors


def _anonymous_file() -> Any:
    """A file without a name: in memory, where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("quire"), "r+b")
    return tempfile.TemporaryFile()
