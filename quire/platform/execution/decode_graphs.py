"""The step in which every sequence has one token, and drafts perhaps: recorded once for each shape, then replayed
without Python."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments, Segment, times_named
from quire.kernels.sampling import can_draw
from quire.lora import AdapterMix, AdapterSlots, capacity_for
from quire.models.base import CausalLM
from quire.platform.execution.batch import StepInputs
from quire.platform.execution.kv_tensors import keys_of
from quire.platform.execution.sequences import WorkerSequence
from quire.types import KVCache, StateCache

logger = logging.getLogger("quire")

# Shapes remembered, the latest first: tokens in the step, times widths of the block table (powers of two), times powers
# of two of the longest position, times sequences, times room for segments of adapters (none, or powers of two of their
# number and of how often rows are named).
_MOST_SHAPES = 256
_LEAST_WIDTH = 16  # blocks
_FEW = 4  # sequences up to which steps with drafts are recorded
_FINE = 8  # sequences up to which a GPU's shapes are powers of two; beyond, multiples of this

Shape = tuple[int, int, int, int, tuple[int, ...]]


class StepLogits(NamedTuple):
    """logits: [T, vocabulary] float32; of a stage that hands on, its hidden states. likeliest: [T] int64, the token of
    each row, as of `kernels.likeliest`, which a recording finds while the logits are still in the caches; None where
    they are a device's, which draws by itself, and of logits that are not rows of float32 one behind the other."""

    logits: torch.Tensor
    likeliest: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recording and the inputs that it reads. arrays: their memory; none on a GPU."""

    inputs: StepInputs
    arrays: Sequence[np.ndarray]
    segments: LoraSegments | None
    recording: Any

    def run(self, inputs: StepInputs, rows: Sequence[Segment]) -> Any:
        """The results, which are those of every other recording, too."""
        if self.segments is not None:
            self.segments.fill(rows)
        if self.inputs.packed is not None and inputs.packed is not None:
            self.inputs.packed.take(inputs.packed)
        else:
            for own, new in zip(self.arrays, inputs.arrays(), strict=True):
                own[..., : new.shape[-1]] = new  # a copy in torch takes several times as long
        self.recording.replay()
        return self.recording.results


class DecodeGraphRunner:
    """Model and logits, of all tokens, for a step in which each sequence has one token, and drafts perhaps.

    A shape is recorded when it is met again, so that no start waits for recordings and a shape that comes once costs
    nothing. On a CPU a recording is a list of kernel calls, on a GPU it is a CUDA graph. A model that does more than
    call kernels is never recorded on a CPU, nor one that waits for a GPU there (the log says what it did); nor any with
    `enforce_eager`.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[KVCache | StateCache],
        enforce_eager: bool = False,
        adapter_slots: AdapterSlots | None = None,
        draws: bool = True,
    ) -> None:
        """draws: whether logits are wanted of it."""
        self._model = model
        self._draws = draws
        self._adapter_slots = adapter_slots
        self._generation = 0  # of the adapter slots, when the recordings with adapters were made
        self._caches = caches
        self._groups = 1 + max(cache.group for cache in caches)
        self._device = keys_of(caches)[0].device
        self._shapes: OrderedDict[Shape, _Recorded | None] = OrderedDict()
        self._recording = None if enforce_eager else _recording_module(keys_of(caches)[0])
        self._workspace = self._recording.Workspace(self._device) if self._recording else None

    def forget(self) -> None:
        """Every recording: what it reads has moved."""
        self._shapes.clear()

    def room(self, sequences: Sequence[WorkerSequence]) -> tuple[int, int]:
        """(sequences, width of the block table) for which the inputs of such a step are to be laid out on a GPU."""
        if self._recording is None:
            return 0, 0
        count = len(sequences)
        rows = 1 << (count - 1).bit_length() if count <= _FINE else -(-count // _FINE) * _FINE
        return rows, _width_for(max(len(sequence.block_ids) for sequence in sequences) // self._groups)

    def __call__(self, inputs: StepInputs, mixes: Sequence[AdapterMix]) -> StepLogits:
        """mixes: of each token. What is returned is good until the next call.

        On a GPU there may be more rows of inputs, and of logits, than mixes: they are nobody's.
        """
        rows = self._adapter_slots.segments((mix, 1) for mix in mixes) if self._adapter_slots is not None else []
        if self._recording is None or not self._are_recordable(inputs, rows, mixes):
            return self._forward(inputs, self._segments(inputs, rows))
        count, blocks = inputs.context.block_table.shape
        shape = (len(inputs.token_ids), _width_for(blocks), inputs.context.position_limit, count, _room_for(rows))
        if shape not in self._shapes:
            self._remember(shape, None)
            return self._forward(inputs, self._segments(inputs, rows))
        self._shapes.move_to_end(shape)
        recorded = self._shapes[shape]
        if recorded is None:
            return self._record(shape, inputs, rows)
        return self._finish(recorded.run(inputs, rows), recorded.segments)

    def _segments(self, inputs: StepInputs, rows: Sequence[Segment]) -> LoraSegments | None:
        return LoraSegments.of(rows, len(inputs.token_ids), self._device) if rows else None

    def _are_recordable(self, inputs: StepInputs, rows: Sequence[Segment], mixes: Sequence[AdapterMix]) -> bool:
        """Whether all of the step is kernels; recordings that read tables which have moved are forgotten."""
        context, threshold = inputs.context, self._model.rope_threshold
        count = len(context.block_table)
        if len(inputs.token_ids) != count > _FEW:  # with drafts: too many shapes to come again
            return False
        if threshold is not None and context.longest > threshold:  # frequencies of each length, worked out in Python
            return False
        if context.rotary_positions is not None and context.rotary_positions.dim() > 1:
            return False
        if self._adapter_slots is None or not rows:
            return True
        if self._generation != self._adapter_slots.generation:
            self._generation = self._adapter_slots.generation
            for shape in [shape for shape in self._shapes if shape[-1]]:
                del self._shapes[shape]
        return self._adapter_slots.are_recordable(mixes)

    def _forward(self, inputs: StepInputs, segments: LoraSegments | None) -> StepLogits:
        hidden = self._hidden(inputs, segments)
        return self._logits(hidden, segments) if self._draws else StepLogits(hidden, None)

    def _hidden(self, inputs: StepInputs, segments: LoraSegments | None) -> torch.Tensor:
        model = self._model
        with nullcontext() if self._adapter_slots is None else self._adapter_slots.using(segments):
            hidden: torch.Tensor = model(model.embed(inputs.token_ids), inputs.context, self._caches)
        return hidden

    def _logits(self, hidden: torch.Tensor, segments: LoraSegments | None) -> StepLogits:
        with (
            nullcontext() if self._adapter_slots is None else self._adapter_slots.using(segments)
        ):  # each row is one token's
            logits = self._model.logits(hidden)
        here = logits.is_cpu and logits.dtype is torch.float32 and logits.is_contiguous() and not can_draw(logits)
        return StepLogits(logits, kernels.likeliest(logits) if here else None)

    def _finish(self, results: Any, segments: LoraSegments | None) -> StepLogits:
        """From a recording's results to logits.

        A graph's results keep their memory: those of a GPU end with the hidden states, and the logits, which are a
        hundred times as large, are computed behind it.
        """
        return results if self._device.type == "cpu" else self._logits(results, segments)

    def _record(self, shape: Shape, inputs: StepInputs, rows: Sequence[Segment]) -> StepLogits:
        assert self._recording is not None
        tokens, width, _, _, room = shape
        segments = LoraSegments(room[0], tokens, self._device, room[1]) if room else None
        if segments is not None:
            segments.fill(rows)
        own = inputs.clone()
        context = own.context
        if context.block_table.shape[1] < width:
            context = replace(context, block_table=_widened(context.block_table, width))
            if context.group_tables is not None:
                context = replace(context, group_tables=_widened(context.group_tables, width))
            own = replace(own, context=context)
        try:
            recorded = self._forward if self._device.type == "cpu" else self._hidden
            recording = self._recording.record(
                lambda: recorded(own, segments), self._workspace, self._model.recorded_operations
            )
        except self._recording.NotRecordable as reason:
            logger.warning(
                "%s: steps of one token a sequence run through Python, which is slower: %s (docs/adding-a-model.md)",
                type(self._model).__name__, reason,
            )  # fmt: skip
            self._recording = self._workspace = None
            self._shapes.clear()
            return self._forward(inputs, self._segments(inputs, rows))
        arrays = own.arrays() if own.packed is None else []
        self._remember(shape, _Recorded(own, arrays, segments, recording))
        return self._finish(recording.results, segments)

    def _remember(self, shape: Shape, recorded: _Recorded | None) -> None:
        self._shapes[shape] = recorded
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)


def _widened(table: torch.Tensor, width: int) -> torch.Tensor:
    """A block table, or those of several groups, with `width` columns."""
    wide = table.new_zeros((*table.shape[:-1], width))
    wide[..., : table.shape[-1]] = table
    return wide


def _width_for(blocks: int) -> int:
    return max(_LEAST_WIDTH, 1 << (blocks - 1).bit_length())


def _room_for(rows: Sequence[Segment]) -> tuple[int, ...]:
    """For how many segments, of how often named rows, a recording is made: sizes that seldom differ between steps."""
    return (capacity_for(rows), 1 << (times_named(rows) - 1).bit_length()) if rows else ()


def _recording_module(keys: torch.Tensor) -> ModuleType | None:
    """What records on the device of the keys; None where the reference kernels run."""
    if keys.is_cuda:
        from quire.kernels import graphs

        return graphs
    if kernels.backend().__name__ != "quire.kernels.native":
        return None
    from quire.kernels import recording

    return recording
