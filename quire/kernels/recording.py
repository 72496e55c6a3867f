"""Doing again what a function asked of the kernels, without Python: what CUDA graphs are on a GPU.

A small model's step on a CPU spends an eighth of its time between kernels. A function that does nothing but call
kernels, on tensors of the same shapes and addresses each time, is recorded once; replaying makes the same calls, with
their checks, in one call. Its inputs are changed in place.

That it does nothing else is checked while it is recorded: every other operation of torch that computes, makes a tensor
of numbers, or reads a number out of a tensor, ends the recording. Views are harmless, and new tensors come from a
`Workspace`. What reaches a tensor's memory past torch (dlpack, torch.from_numpy, an extension) cannot be seen.

Whoever records may name operations of torch's that are done again too, between kernels (`operations.py`): of each it is
known what it reads and writes. What turns tensors into numbers is none of them.

A function whose kernels are all about a step's tokens, row by row, can be recorded once for steps of any size
(`record_sizable`).
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quire.kernels._C as _C
from quire.kernels.operations import NotAgain, Operation, name_of

_ALIGNMENT = 64  # bytes
_LEAST_CHUNK = 1 << 20  # bytes
# Operations that any recording does again: those of `group_exchange.py` and `pipe.py`.
_OWN = frozenset({"exchange_columns", "pipe_receive", "pipe_send"})
_NOT_THE_MODEL_S = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class NotRecordable(Exception):
    """The function does something that a replay would leave out; the message says what."""


class Workspace:
    """Memory for the tensors that recorded functions make.

    All recordings in one workspace use the same memory from its beginning: results are good until another of them is
    replayed or made.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """device: the CPU."""
        self._chunks: list[torch.Tensor] = []
        self._taken: list[list[_Piece]] = []

    def begin(self) -> None:
        """Forget what the last recording took."""
        self._taken = [[] for _ in self._chunks]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is taken again once it and all its views are gone."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        for chunk, taken in zip(self._chunks, self._taken, strict=True):
            start = _first_fit(taken, size, chunk.numel())
            if start is not None:
                break
        else:
            chunk = torch.empty(max(_LEAST_CHUNK, 2 * size), dtype=torch.uint8)
            start, taken = 0, []
            self._chunks.append(chunk)
            self._taken.append(taken)
        # Of its own storage, not a view of the chunk's: when that storage dies, nobody can reach the memory.
        count = math.prod(shape)
        tensor = torch.frombuffer(chunk.numpy(), dtype=dtype, count=count, offset=start).view(shape)
        taken.append(_Piece(start, start + size, StorageWeakRef(tensor.untyped_storage())))
        taken.sort(key=lambda piece: piece.start)
        return tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return self._chunk_of(tensor.data_ptr()) is not None

    def again(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers of this memory as a tensor that keeps nobody from taking them again; others as they are."""
        chunk = self._chunk_of(tensor.data_ptr())
        if chunk is None:
            return tensor
        start = tensor.data_ptr() - chunk.data_ptr()
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in strides) if tensor.numel() else 0
        flat = chunk[start : start + span * tensor.itemsize].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def _chunk_of(self, address: int) -> torch.Tensor | None:
        found = (one for one in self._chunks if one.data_ptr() <= address < one.data_ptr() + one.numel())
        return next(found, None)


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    end: int
    storage: StorageWeakRef


def _first_fit(taken: list[_Piece], size: int, limit: int) -> int | None:
    """Where `size` bytes fit among the pieces that are still in use."""
    taken[:] = [piece for piece in taken if not piece.storage.expired()]
    start = 0
    for piece in taken:
        if start + size <= piece.start:
            return start
        start = -(-piece.end // _ALIGNMENT) * _ALIGNMENT
    return start if start + size <= limit else None


@dataclass(frozen=True)
class Recording:
    """What a function asked for and, in `results`, what it returned: the tensors that a replay writes."""

    results: Any
    _parts: Sequence[Any] = field(repr=False)  # runs of kernel calls, and torch's operations between them
    _workspace: Workspace = field(repr=False)  # the calls know its addresses only

    def replay(self) -> None:
        """Do it all again. Raises what a kernel's checks of its inputs raise."""
        for part in self._parts:
            part.replay()

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)


@dataclass(frozen=True)
class SizableRecording:
    """What a function asked for of a step of the size that it was recorded with. `results` has as many rows, of which a
    replay writes the first."""

    results: Any
    _calls: Any = field(repr=False)
    _workspace: Workspace = field(repr=False)

    def replay(self, tokens: int, sequences: int, wanted: int = 0) -> None:
        """Do it all for so many. Raises ValueError for more than were recorded, and what kernels' checks raise."""
        self._calls.replay_for(tokens, sequences, wanted)


def record(function: Callable[[], Any], workspace: Workspace, operations: Collection[str] = ()) -> Recording:
    """Run `function` once, in this thread, and record it. operations: names of torch's that may be done again, too.

    What it reads (weights, caches, inputs) must stay where it is for as long as the recording is used. Raises
    NotRecordable, and whatever the function raises.
    """
    kernels_only = _OnlyKernels(workspace, frozenset(operations), _OWN)
    results = _run(function, kernels_only, lambda: kernels_only.calls.begin())
    return Recording(results, [part for part in (*kernels_only.parts, kernels_only.calls) if len(part)], workspace)


def record_sizable(
    function: Callable[[], Any], workspace: Workspace, tokens: int, sequences: int, wanted: int = 0
) -> SizableRecording:
    """Have `function` ask for what it asks of a step of so many tokens and sequences, in this thread, and record it.

    wanted: how many tokens' rows the function goes on with at its end; 0: all.
    Nothing is computed meanwhile, so its inputs may hold anything. It must ask for the same of a step of any size, of
    two tokens at least, and lay its tensors out token by token. NotRecordable is raised where it does more than call
    kernels that know how many tokens they are about, calls one for another number of rows than tokens (or a multiple),
    or has a tensor whose strides depend on their number. For this to be seen, `tokens` and `wanted` must be primes that
    differ: what is no multiple of them has nothing to do with them. (What is one by chance is refused, too, but for a
    kernel's rows: a function must not call kernels for a number of rows that it always has.) What it reads must stay
    where it is, as for `record`.
    """
    kernels_only = _OnlyKernels(workspace, primes=(tokens, wanted) if wanted else (tokens,))
    results = _run(function, kernels_only, lambda: kernels_only.calls.begin_sizable(tokens, sequences, wanted))
    if not kernels_only.calls.sizable:
        raise NotRecordable("a kernel is not about the step's tokens, so many rows each")
    return SizableRecording(results, kernels_only.calls, workspace)


def _run(function: Callable[[], Any], kernels_only: _OnlyKernels, begin: Callable[[], None]) -> Any:
    """What the function returns, recorded. Raises NotRecordable, and whatever it raises."""
    kernels_only.workspace.begin()
    with kernels_only, _NoNumbers(kernels_only):
        try:
            begin()
            results = function()
        except Exception:
            # The refusal may come out as another error, through torch.jit for one.
            if not kernels_only.refused:
                raise
        finally:
            kernels_only.calls.end()
    if kernels_only.refused:
        raise NotRecordable(kernels_only.refused)
    return results


class _OnlyKernels(TorchDispatchMode):
    """Gives new tensors the workspace's memory, and lets nothing pass but views.

    refused: what did not pass first, and where it was called, whatever became of the error. parts: what is to be done
    again, but for the calls of kernels since the last operation of torch's, which are in `calls`.
    """

    def __init__(
        self,
        workspace: Workspace,
        operations: frozenset[str] = frozenset(),
        own: frozenset[str] = frozenset(),
        primes: tuple[int, ...] = (),
    ) -> None:
        """operations, own: that are done again. primes: numbers of rows on which no stride may depend."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.workspace = workspace
        self.operations, self._again, self._primes = operations, operations | own, primes
        self.refused = ""
        self.parts: list[Any] = []
        self.calls = _C.Recording()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by torch. Else the first call would import its compiler, which takes a second."""
        return False

    def refuse(self, what: str) -> NoReturn:
        self.refused = self.refused or f"{what} ({place_of(traceback.extract_stack())}) is no kernel of quire's"
        raise NotRecordable(self.refused)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and _is_plain(kwargs):
            made = self.workspace.empty(tuple(args[0]), kwargs["dtype"])
            return self._row_by_row(made, made)
        if func.is_view:
            result = func(*args, **kwargs)
            parts = result if isinstance(result, (tuple, list)) else [result]
            # Some of them (reshape) copy where they cannot view.
            if all(_same_memory(args[0], self._row_by_row(part, args[0])) for part in parts):
                return result
        if name_of(func) in self._again:
            return self._operate(func, args, kwargs)
        self.refuse(str(func))

    def _row_by_row(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """A new tensor, or a view of another, if it lies as it would with other numbers of rows. Strides of what the
        function has not made, weights for one, have nothing to do with them."""
        numbers = [tensor.storage_offset() - whole.storage_offset()]
        if self._primes and self.workspace.owns(tensor):
            numbers += [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        for prime in self._primes:
            if any(number and number % prime == 0 for number in numbers):
                self.refuse(f"a tensor whose place or strides {tensor.stride()} go by the number of rows, {prime},")
        return tensor

    def _operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation of torch's, in the workspace's memory, and remember it."""
        self.calls.end()
        try:
            made = Operation(func, args, kwargs, self.workspace)
        except NotAgain as reason:
            self.refuse(f"{func}{reason}")
        finally:
            if len(self.calls):
                self.parts.append(self.calls)
                self.calls = _C.Recording()
            self.calls.begin()
        if len(made):
            self.parts.append(made)
        return made.take_results()


class _NoNumbers(TorchFunctionMode):
    """Refuses what turns tensors into numbers or numbers into tensors without an operation that a dispatcher sees."""

    _OF_NUMBERS = frozenset({"tensor", "as_tensor"})
    _NAMES = _OF_NUMBERS | {"tolist", "numpy", "__array__", "item", "asarray"}

    def __init__(self, kernels_only: _OnlyKernels) -> None:
        super().__init__()
        self._kernels_only = kernels_only

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        constant = name in self._OF_NUMBERS and self._kernels_only.operations and not _has_tensor(args)
        if name in self._NAMES and not constant:
            self._kernels_only.refuse(name)
        return func(*args, **(kwargs or {}))


def _has_tensor(args: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in tree_leaves(args))


def place_of(calls: Iterable[traceback.FrameSummary]) -> str:
    """The file and line of a stack's innermost call that is neither torch's nor in this folder."""
    own = [call for call in calls if not call.filename.startswith(_NOT_THE_MODEL_S)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "place unknown"


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_plain(options: dict[str, Any]) -> bool:
    """Dense, on the CPU, of a given dtype."""
    device = options.get("device")
    return "dtype" in options and (device is None or device.type == "cpu") and not options.get("layout")
