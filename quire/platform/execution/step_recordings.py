"""Steps of any number of tokens, replayed without Python from recordings that are made once: `StepRecordings`.

Between its kernels a small model's step spends more than a twentieth of its time in Python, and steps that are computed
side by side wait for one another there. What is recorded for a number of tokens serves all smaller ones.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quire import kernels
from quire.models.base import CausalLM
from quire.platform.execution.batch import tensors
from quire.types import MOST_RECORDED, ForwardContext, KVCache, StateCache

logger = logging.getLogger("quire")

# For so many tokens, and rows that are wanted, recordings are made: primes, see `record_sizable`, of which few are
# factors of the sizes that models have. Of more tokens, Python is no part of a step's time that is worth the memory.
_TOKENS = (131, 269, 521, MOST_RECORDED)
_WANTED = (47, 83, 167, 331, 523)
_NO_BLOCK = -1
_PATIENCE = 1.0  # seconds for which other threads' steps are waited for, so that one can be recorded
_MOST_SHAPES = 32  # remembered, the latest first
_LEAST, _TIMES = 64, 8  # sequences, and blocks of each; what has room for more serves as well, so that there are few
# The dimensions of the context's tensors: tokens, sequences, sequences + 1, blocks, groups of layers but the first,
# rows that are wanted.
_DIMENSIONS = {
    "positions": "T", "slot_mapping": "T", "visible_end": "T", "rotary_positions": "T", "token_types": "T",
    "position_rows": "T", "query_start": "E", "context_len": "S", "prompt_len": "S", "block_table": "SB",
    "group_slots": "GT", "group_tables": "GSB", "wanted": "R",
}  # fmt: skip


class _Shape(NamedTuple):
    """What one recording serves: steps of as many tokens, sequences, rows that are wanted (0: all) and blocks of each
    sequence, or fewer; positions below the limit; a context that has these tensors."""

    tokens: int
    sequences: int
    wanted: int
    width: int
    position_limit: int
    names: tuple[str, ...]


class _Recorded:
    """A recording and the memory that it reads: token_ids, then the context's tensors by name."""

    def __init__(self, recording: Any, memory: Sequence[torch.Tensor]) -> None:
        self._recording = recording
        self._arrays = [tensor.numpy() for tensor in memory]
        self._written = [0] * len(memory)  # columns of each

    def run(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        for place, tensor in enumerate((token_ids, *tensors(context).values())):
            new = tensor.numpy()  # a copy in torch takes several times as long
            own, width = self._arrays[place], new.shape[-1]
            if new.ndim > 1:
                own[..., width : self._written[place]] = _NO_BLOCK  # those of earlier steps are others'
                self._written[place] = width
            own[tuple(map(slice, new.shape))] = new
        tokens, sequences = len(token_ids), len(context.context_len)
        wanted = 0 if context.wanted is None else len(context.wanted)
        self._recording.replay(tokens, sequences, wanted)
        hidden: torch.Tensor = self._recording.results[: wanted or tokens]
        return hidden.clone()  # so that nobody has to be done with it before the next step


class _Recordings:
    """Of one thread at a time: all read and write the same memory."""

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace
        self.of: OrderedDict[_Shape, _Recorded] = OrderedDict()


class StepRecordings:
    """The model's forward pass without adapters: on a CPU, of steps of any number of tokens, from recordings. Several
    threads may ask at once.

    A shape is recorded when it is met again, and while no thread is in the model's Python: what layers make when they
    are first asked (tables of positions, of experts) is there then, and nobody replaces it. None is recorded with
    `enforce_eager`, nor where the model does more than call kernels that know how many tokens they are about.
    """

    def __init__(
        self, model: CausalLM, caches: Sequence[KVCache | StateCache], device: torch.device, enforce_eager: bool
    ) -> None:
        self._model, self._caches = model, caches
        self._module: Any = None
        self._turn = threading.Lock()  # to begin a step
        self._changed = threading.Condition()  # of what follows
        self._in_python: set[int] = set()  # threads
        self._met: set[_Shape] = set()
        self._refused: set[_Shape] = set()
        self._free: list[_Recordings] = []  # that no thread uses now
        if device.type == "cpu" and not enforce_eager and kernels.backend().__name__ == "quire.kernels.native":
            from quire.kernels import recording

            self._module = recording

    def forget(self) -> None:
        """Every recording: what it reads has moved. Only while nothing runs."""
        for known in (self._free, self._met, self._refused):
            known.clear()

    def __call__(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """token_ids: [T] int64 -> what the model makes of them."""
        if self._module is None:
            return self._forward(token_ids, context)
        shape = _shape_of(token_ids, context) if self._is_recordable(token_ids, context) else None
        this = threading.get_ident()
        own, recorded = None, None
        try:
            with self._turn:
                self._leave_python(this)  # an interrupt may have come before it could say so
                own = self._free.pop() if self._free else _Recordings(self._module.Workspace())
                recorded = None if shape is None else self._recorded(own, shape, context)
                if recorded is None:
                    self._in_python.add(this)
            if recorded is not None:
                return recorded.run(token_ids, context)
            hidden = self._forward(token_ids, context)
            if shape is not None:
                self._met.add(shape)
            return hidden
        finally:
            if recorded is None:
                self._leave_python(this)
            if own is not None:
                self._free.append(own)

    def _leave_python(self, thread: int) -> None:
        with self._changed:
            self._in_python.discard(thread)
            self._changed.notify_all()

    def _recorded(self, own: _Recordings, shape: _Shape, context: ForwardContext) -> _Recorded | None:
        """None: there is none. While a thread has its turn here, no other gets into the model's Python."""
        if shape in own.of:
            own.of.move_to_end(shape)
            return own.of[shape]
        if shape not in self._met or shape in self._refused:
            return None
        with self._changed:
            alone = self._changed.wait_for(lambda: not self._in_python, _PATIENCE)
        return self._record(own, shape, context) if alone else None

    def _forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self._model(self._model.embed(token_ids), context, self._caches)
        return hidden

    def _is_recordable(self, token_ids: torch.Tensor, context: ForwardContext) -> bool:
        if not 1 < len(token_ids) <= _TOKENS[-1]:
            return False
        threshold = self._model.rope_threshold
        if threshold is not None and context.longest > threshold:  # frequencies of each length, worked out in Python
            return False
        if context.rotary_positions is not None and context.rotary_positions.dim() > 1:
            return False
        return context.whole_prompts is None and context.level_rows is None

    def _record(self, own: _Recordings, shape: _Shape, context: ForwardContext) -> _Recorded | None:
        """None: it cannot be."""
        groups = 0 if context.group_slots is None else len(context.group_slots)
        sizes = {"T": shape.tokens, "S": shape.sequences, "E": shape.sequences + 1, "R": shape.wanted}
        sizes |= {"B": shape.width, "G": groups}
        named = tensors(context)
        made: dict[str, Any] = {}
        for name in shape.names:
            *before, last = (sizes[letter] for letter in _DIMENSIONS[name])
            # A number more at the end of each row: no stride depends on the number of tokens.
            made[name] = torch.full([*before, last + 1], _NO_BLOCK, dtype=named[name].dtype)[..., :last]
        token_ids = torch.zeros(shape.tokens, dtype=torch.int64)
        its_own = replace(context, **made)
        model, caches = self._model, self._caches
        try:
            recording = self._module.record_sizable(
                lambda: model(model.embed(token_ids), its_own, caches), own.workspace, *shape[:3]
            )
        except Exception as reason:  # whatever it is, the step can be made without a recording
            own_fault = isinstance(reason, self._module.NotRecordable)
            logger.log(
                logging.DEBUG if own_fault else logging.WARNING,
                "%s: steps of up to %s tokens run through Python: %s", type(model).__name__, shape.tokens, reason,
            )  # fmt: skip
            self._refused.add(shape)
            return None
        recorded = _Recorded(recording, (token_ids, *made.values()))
        own.of[shape] = recorded
        if len(own.of) > _MOST_SHAPES:
            own.of.popitem(last=False)
        return recorded


def _shape_of(token_ids: torch.Tensor, context: ForwardContext) -> _Shape:
    sequences, width = context.block_table.shape
    return _Shape(
        next(size for size in _TOKENS if size >= len(token_ids)),
        _room_for(sequences),
        0 if context.wanted is None else next(size for size in _WANTED if size >= len(context.wanted)),
        _room_for(width),
        context.position_limit,
        tuple(tensors(context)),
    )


def _room_for(count: int) -> int:
    room = _LEAST
    while room < count:
        room *= _TIMES
    return room
