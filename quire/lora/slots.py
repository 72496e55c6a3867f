"""The adapters on the device: their weights in the tables of the layers, and who owns which rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.kernels.adapters import AllRows, LoraSegments, LoraTable, Segment
from quire.kernels.transfer import send
from quire.layers import Embedding, LatentProjection, Linear
from quire.layers.adapters import EmbeddingAdapters, LinearAdapters, LoRAContext, NormAdapters, on_device
from quire.layers.latent import LatentAdapters, LatentChange
from quire.layers.shards import shard_of
from quire.lora.adapter import Adapter
from quire.lora.base import adapter_dtype
from quire.lora.binding import Change
from quire.models.base import CausalLM

_FIRST_SLOTS = 8

AdapterMix = tuple[tuple[int, float], ...]  # (uid, weight) of each adapter; empty: the base model


@dataclass(frozen=True)
class _Installed:
    """parameters: the adapter's, on the device."""

    slot: int
    adapter: Adapter
    parameters: Mapping[str, torch.Tensor]


class AdapterSlots:
    """Installs adapters into the layers of one model.

    weights: the weights of an adapter that the device's budget has claimed. generation: grows whenever what a recorded
    step reads has moved.
    """

    def __init__(self, model: CausalLM, weights: Callable[[int], Adapter]) -> None:
        self.generation = 0
        self._weights = weights
        self._context = LoRAContext()
        self._model = model
        self._modules = dict(model.named_modules())
        weight = next(model.parameters())
        self.device = weight.device
        self._dtype = model.dtype
        self._row_major: bool = kernels.backend_of(weight).ROW_MAJOR_B
        self._installed: dict[int, _Installed] = {}  # by uid
        self._free: list[int] = []
        self._slots = _FIRST_SLOTS  # of every table

    def install(self, uid: int) -> None:
        """Put an adapter into the tables of the layers that it changes."""
        adapter = self._weights(uid)
        slot = self._free.pop() if self._free else len(self._installed)
        if slot >= self._slots:
            self._grow()
        for name, change in adapter.changes.items():
            module = self._modules[name]
            if module.adapters is None:
                module.adapters = self._new(name, module)
                self.generation += 1
            self.generation += module.adapters.put(slot, self._on_device(change, module))
        parameters = {name: send(tensor, self.device) for name, tensor in adapter.parameters.items()}
        self._installed[uid] = _Installed(slot, adapter, parameters)

    def _grow(self) -> None:
        """Have more slots, in the tables of all layers: kernels look a slot up wherever some adapter changes a layer,
        and not only where the slot's own does."""
        self._slots *= 2
        for module in self._modules.values():
            own = getattr(module, "adapters", None)
            if isinstance(own, (LinearAdapters, LatentAdapters)):
                own.grow(self._slots)
        self.generation += 1

    def drop(self, uid: int) -> None:
        """Take an adapter out of all tables."""
        installed = self._installed.pop(uid)
        for name in installed.adapter.changes:
            self._modules[name].adapters.drop(installed.slot)
        self._free.append(installed.slot)

    def segments(self, mixes: Iterable[tuple[AdapterMix, int]]) -> list[Segment]:
        """Which rows each adapter works on; mixes: (adapters, number of rows) in the order of the rows."""
        runs: list[tuple[int, int, AdapterMix]] = []
        end = 0
        for mix, count in mixes:
            start, end = end, end + count
            if mix and count:
                if runs and runs[-1][2] == mix and runs[-1][1] == start:
                    start = runs.pop()[0]
                runs.append((start, end, mix))
        return [(start, end, self._installed[uid].slot, weight) for start, end, mix in runs for uid, weight in mix]

    def are_recordable(self, mixes: Iterable[AdapterMix]) -> bool:
        """Whether the kernel alone does what these adapters change."""
        return all(self._installed[uid].adapter.recordable for mix in mixes for uid, _ in mix)

    @contextmanager
    def using(self, segments: LoraSegments | None) -> Iterator[None]:
        """Let the layers add what these adapters change, each in its rows."""
        self._context.segments = segments
        try:
            yield
        finally:
            self._context.segments = None

    @contextmanager
    def encoding_for(self, mix: AdapterMix) -> Iterator[None]:
        """Let the layers add what these adapters change in all rows; a tower's own modules get their parameters."""
        if not mix:
            yield
            return
        own: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        try:
            for uid, _ in mix:
                for name, tensor in self._installed[uid].parameters.items():
                    path, _, leaf = name.rpartition(".")
                    module = self._modules[path]
                    own.append((module, leaf, module._parameters[leaf]))
                    module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            slots = [(self._installed[uid].slot, weight) for uid, weight in mix]
            with self.using(AllRows(slots, self.device)):
                yield
        finally:
            for module, leaf, parameter in reversed(own):
                module._parameters[leaf] = parameter

    def _on_device(self, change: Change, module: nn.Module) -> Any:
        """A change as the device's kernels read it."""
        if isinstance(module, LatentProjection) and isinstance(change, LatentChange):
            return change.for_device(module, self.device, self._row_major)
        columns = module.out_features if isinstance(module, Linear) else 0
        return on_device(change, columns, self.device, self._row_major)

    def _new(self, name: str, module: nn.Module) -> LinearAdapters | LatentAdapters | EmbeddingAdapters | NormAdapters:
        if isinstance(module, LatentProjection):
            return module.new_adapters(self._context, name, self._dtype, self._slots, self.device, self._row_major)
        if isinstance(module, Linear):
            shard = shard_of(module)
            table = LoraTable(
                module.in_features,
                module.out_features,
                adapter_dtype(self._model, name, module),
                self._slots,
                device=self.device,
                row_major=self._row_major,
                rows=None if shard is None else shard.rows_of(module.out_features),
            )
            return LinearAdapters(self._context, name, table)
        kind = EmbeddingAdapters if isinstance(module, Embedding) else NormAdapters
        return kind(self._context, name)


def capacity_for(rows: Sequence[Segment]) -> int:
    """A size for recorded segments that seldom differs between steps: a power of two."""
    return 1 << max(len(rows) - 1, 0).bit_length()
