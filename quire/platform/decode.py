"""The step in which every sequence has one token: recorded once for each shape, then replayed without Python."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import torch

from quire import kernels
from quire.contracts import ForwardContext, KVCache
from quire.kernels.adapters import LoraSegments, Segment
from quire.lora import AdapterBank, Owner, capacity_for
from quire.models.base import CausalLM

logger = logging.getLogger("quire")

# Shapes remembered, the latest first: sequences in the step, times widths of the block table (powers of two), times
# powers of two of the longest position, times room for segments of adapters (none, and powers of two).
_MOST_SHAPES = 256
_LEAST_WIDTH = 16  # blocks

_NAMES = [field.name for field in fields(ForwardContext) if field.name != "position_limit"]

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recording and the inputs that it reads."""

    token_ids: torch.Tensor
    context: ForwardContext
    segments: LoraSegments | None
    recording: Any

    def run(self, token_ids: torch.Tensor, context: ForwardContext, rows: Sequence[Segment]) -> torch.Tensor:
        _copy(token_ids, self.token_ids)
        if self.segments is not None:
            self.segments.fill(rows)
        for name, tensor in _tensors(context).items():
            _copy(tensor, getattr(self.context, name))
        self.recording.replay()
        logits: torch.Tensor = self.recording.results
        return logits


class DecodeStep:
    """Model and logits for a step in which each sequence has one token.

    A shape is recorded when it is met again, so that no start waits for recordings and a shape that comes once costs
    nothing. A model that does more than call kernels is never recorded; nor is any with `enforce_eager`.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[KVCache],
        enforce_eager: bool = False,
        bank: AdapterBank | None = None,
    ) -> None:
        self._model = model
        self._bank = bank
        self._generation = 0  # of the bank, when the recordings with adapters were made
        self._caches = caches
        self._shapes: OrderedDict[Shape, _Recorded | None] = OrderedDict()
        self._recording = None if enforce_eager else _recording_module()
        self._workspace = self._recording.Workspace() if self._recording else None

    def __call__(self, token_ids: torch.Tensor, context: ForwardContext, owners: Sequence[Owner]) -> torch.Tensor:
        """token_ids: [T]; owners: of each token. Returns logits [T, vocabulary] float32, good until the next call."""
        rows = self._bank.segments((owner, 1) for owner in owners) if self._bank is not None else []
        if self._recording is None or not self._are_recordable(rows, owners):
            return self._forward(token_ids, context, LoraSegments.of(rows) if rows else None)
        width = max(_LEAST_WIDTH, 1 << (context.block_table.shape[1] - 1).bit_length())
        shape = (len(token_ids), width, context.position_limit, capacity_for(rows) if rows else 0)
        if shape not in self._shapes:
            self._remember(shape, None)
            return self._forward(token_ids, context, LoraSegments.of(rows) if rows else None)
        self._shapes.move_to_end(shape)
        recorded = self._shapes[shape]
        if recorded is not None:
            return recorded.run(token_ids, context, rows)
        return self._record(shape, token_ids, context, rows)

    def _are_recordable(self, rows: Sequence[Segment], owners: Sequence[Owner]) -> bool:
        """Whether all of the step is kernels; recordings that read tables which have moved are forgotten."""
        if self._bank is None or not rows:
            return True
        if self._generation != self._bank.generation:
            self._generation = self._bank.generation
            for shape in [shape for shape in self._shapes if shape[-1]]:
                del self._shapes[shape]
        return self._bank.are_recordable(owners)

    def _forward(self, token_ids: torch.Tensor, context: ForwardContext, segments: LoraSegments | None) -> torch.Tensor:
        model = self._model
        if self._bank is None or segments is None:
            return model.logits(model(model.embed(token_ids), context, self._caches))
        with self._bank.using(segments):  # each row of the logits is one token's
            return model.logits(model(model.embed(token_ids), context, self._caches))

    def _record(
        self, shape: Shape, token_ids: torch.Tensor, context: ForwardContext, rows: Sequence[Segment]
    ) -> torch.Tensor:
        assert self._recording is not None
        tokens, width, _, capacity = shape
        segments = LoraSegments(capacity) if capacity else None
        if segments is not None:
            segments.fill(rows)
        table = torch.zeros((tokens, width), dtype=torch.int32)
        own: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(context).items()}
        own["block_table"] = table
        _copy(context.block_table, table)
        ids, fixed = token_ids.clone(), replace(context, **own)
        try:
            recording = self._recording.record(lambda: self._forward(ids, fixed, segments), self._workspace)
        except self._recording.NotRecordable as reason:
            logger.info("decode steps are run through Python: %s", reason)
            self._recording = self._workspace = None
            self._shapes.clear()
            return self._forward(token_ids, context, segments)
        self._remember(shape, _Recorded(ids, fixed, segments, recording))
        logits: torch.Tensor = recording.results
        return logits

    def _remember(self, shape: Shape, recorded: _Recorded | None) -> None:
        self._shapes[shape] = recorded
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)


def _tensors(context: ForwardContext) -> dict[str, torch.Tensor]:
    """Its tensors by name; whether one is None depends on the model alone."""
    found = {name: getattr(context, name) for name in _NAMES}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Into the first columns, where the target has more."""
    (target if target.shape == source.shape else target[:, : source.shape[1]]).copy_(source)


def _recording_module() -> ModuleType | None:
    """None where the native kernels do not run."""
    if kernels.backend().__name__ != "quire.kernels.native":
        return None
    from quire.kernels import recording

    return recording
