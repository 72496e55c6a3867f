"""GGUF files: which rows of bytes each layer takes, and what else is made of the file's tensors.

A matrix stays in the file's blocks: rows are moved as wholes. What cannot stay so is given as floats, exactly, and the
log says it: rows of several kinds that are one layer here, and latents' keys and values. On a GPU so are experts.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quire.checkpoint.files import Checkpoint, listed
from quire.checkpoint.gguf.header import kind_name
from quire.checkpoint.gguf.names import Names, Source, latent_rows, rows_of
from quire.checkpoint.gguf.tensors import FLOATS, GgufCheckpoint
from quire.checkpoint.weights import StoredPart
from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.quantized import RowKind, RowLayout
from quire.layers import Embedding, LatentProjection, Linear
from quire.models.pooling.base import PoolingModel
from quire.models.quantization.plan import QuantizationPlan, QuantizedLayer

if TYPE_CHECKING:
    from quire.models.base import CausalLM

logger = logging.getLogger("quire")

_MULTIPLIED = (
    "the weights of falcon-h1's GGUF files have been multiplied by numbers that are no longer known, and what an "
    "adapter adds would have to be, too: take the model's safetensors"
)
_SERVED = frozenset(int(kind) for kind in RowKind if kind < 1000)


def plan_of(model: CausalLM, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> QuantizationPlan:
    """Raises UnsupportedModelError for kinds of blocks that are not served, CheckpointError for what does not fit."""
    if not isinstance(checkpoint, GgufCheckpoint):
        raise UnsupportedModelError(
            f"{checkpoint.directory}: config.json says that its weights are GGUF's; they are not."
        )
    _check_kinds(checkpoint)
    return _Planner(model, checkpoint).plan()


def _check_kinds(checkpoint: GgufCheckpoint) -> None:
    others: dict[int, int] = {}
    for name in checkpoint.names():
        kind = checkpoint.kind_of(name)
        if kind not in _SERVED and kind not in FLOATS:
            others[kind] = others.get(kind, 0) + 1
    if others:
        found = ", ".join(f"{kind_name(kind)} ({count} tensors)" for kind, count in sorted(others.items()))
        served = ", ".join(kind_name(kind) for kind in sorted(_SERVED))
        raise UnsupportedModelError(
            f"{checkpoint.file.name}: has blocks of kinds that are not served: {found}; served are {served}. Take the "
            "model's file in one of these: Q4_K_M, Q5_K_M, Q6_K or Q8_0."
        )


@dataclass
class _Planner:
    """One model's plan in the making."""

    model: CausalLM
    checkpoint: GgufCheckpoint
    layers: dict[str, QuantizedLayer] = field(default_factory=dict)
    parts: dict[str, StoredPart] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    as_floats: list[str] = field(default_factory=list)

    def plan(self) -> QuantizationPlan:
        names = Names(self.checkpoint.file, self.model.config.num_hidden_layers)
        self.stays = any(self.checkpoint.kind_of(name) not in FLOATS for name in self.checkpoint.names())
        self.own = self.model.checkpoint_parts()
        for place, old in [*self.model.named_parameters(), *self.model.named_buffers()]:
            source, numbers = names.source(place), names.numbers(place)
            if source is not None:
                self._fill(place, old, source)
            elif numbers is not None:
                self.parts[place] = StoredPart({}, partial(torch.tensor(numbers).view, old.shape))
        self._share()
        if self.as_floats:
            logger.warning("%s: held as floats: %s", self.checkpoint.file.name, listed(self.as_floats))
        ignored = [name for name in self.checkpoint.names() if names.is_ignored(name)]
        if isinstance(self.model, PoolingModel):  # which has no projection to the vocabulary
            ignored += [name for name in self.checkpoint.names() if name in ("output.weight", "output.bias")]
        why = _MULTIPLIED if self.checkpoint.file.architecture == "falcon-h1" else ""
        return QuantizationPlan(self.layers, self.parts, self.names, ignored, widens_experts=True, no_adapters=why)

    def _fill(self, place: str, old: torch.Tensor, source: Source) -> None:
        self._check_shape(place, old, source)
        layout = self._layout(place, source)
        if layout is not None:
            rows = None if self._as_it_stands(place, source) else self._part(source)
            self.layers[place.removesuffix(".weight")] = QuantizedLayer(layout, rows)
            if rows is None:
                self.names[source.pieces[0].tensor] = place
            return
        kinds = {self.checkpoint.kind_of(piece.tensor) for piece in source.pieces}
        same = self.checkpoint.shape(source.pieces[0].tensor) == tuple(old.shape)
        if kinds <= FLOATS.keys() and same and self._as_it_stands(place, source):
            self.names[source.pieces[0].tensor] = place
            return
        if not kinds <= FLOATS.keys():
            self.as_floats.append(place)
        self.parts[place] = self._part(source, tuple(old.shape))

    def _as_it_stands(self, place: str, source: Source) -> bool:
        """Whether the file's bytes can be read to their place. Families' own rules for other files are passed by."""
        tensor = source.pieces[0].tensor
        return source.is_plain and place not in self.own and tensor not in self.names and not self._is_transposed(place)

    def _is_transposed(self, place: str) -> bool:
        return any(re.fullmatch(pattern, place) for pattern in self.model.checkpoint_transposed)

    def _layout(self, place: str, source: Source) -> RowLayout | None:
        """Of rows that stay as they are; None: the parameter is of floats."""
        module = self.model.get_submodule(place.rpartition(".")[0])
        rows = place.endswith(".weight") and isinstance(module, (Linear, Embedding))
        if not rows or isinstance(module, LatentProjection) or source.added:
            return None
        kinds = {self.checkpoint.kind_of(piece.tensor) for piece in source.pieces}
        kind = next(iter(kinds))
        if len(kinds) > 1 or kind not in _SERVED or kind == RowKind.F32 or (kind in FLOATS and not self.stays):
            return None
        return RowLayout(RowKind(kind), self.checkpoint.columns(source.pieces[0].tensor))

    def _check_shape(self, place: str, old: torch.Tensor, source: Source) -> None:
        """Rows and columns are what the configuration asks for."""
        file = self.checkpoint.file
        if source.latent:
            return  # what is made of them has a shape that is looked at when it is copied
        rows = 0
        for piece in source.pieces:
            shape = file.tensors[piece.tensor].shape
            own = shape if piece.expert is None else shape[1:]
            if piece.expert is not None and piece.expert >= shape[0]:
                own = (0,)
            rows += own[0] if piece.rows is None else min(piece.rows[1], own[0]) - piece.rows[0]
            if piece.heads and own[0] % (2 * piece.heads):
                own = (0,)
            if math.prod(own[1:]) * rows > old.numel() or not own[0]:
                break
        else:
            if rows * math.prod(own[1:]) == old.numel() and (old.dim() < 2 or own[-1] == old.shape[-1]):
                return
        raise CheckpointError(
            f"{file.name}: {piece.tensor} has shape {shape}, and its metadata asks for {tuple(old.shape)} ({place})."
        )

    def _part(self, source: Source, floats: tuple[int, ...] | None = None) -> StoredPart:
        """floats: the shape of numbers that are to be made; None: rows of bytes are."""
        tensors = list(dict.fromkeys(piece.tensor for piece in source.pieces))
        shapes = {name: torch.Size(self.checkpoint.shape(name)) for name in tensors}
        dtypes = {name: (FLOATS.get(self.checkpoint.kind_of(name), torch.uint8),) for name in tensors}
        kinds = [self.checkpoint.kind_of(name) for name in tensors]
        if floats is None:
            return StoredPart(shapes, rows_of(source), dtypes)
        read = [partial(_floats, kind=kind) for kind in kinds]

        def numbers(*stored: torch.Tensor) -> torch.Tensor:
            if source.latent:
                return latent_rows(*(own(one) for own, one in zip(read, stored, strict=True))).reshape(floats)
            return rows_of(source, read)(*stored).reshape(floats)

        return StoredPart(shapes, numbers, dtypes)

    def _share(self) -> None:
        """A layer that is tied to another has its format."""
        if not self.model.is_tied:
            return
        for place, shared in self.model.tied_weights.items():
            own, other = place.removesuffix(".weight"), shared.removesuffix(".weight")
            if own not in self.layers and other in self.layers and not self._filled(place):
                self.layers[own] = QuantizedLayer(self.layers[other].layout, None)

    def _filled(self, place: str) -> bool:
        return place in self.parts or place in self.names.values()


def _floats(stored: torch.Tensor, kind: int) -> torch.Tensor:
    """The numbers that rows of bytes mean."""
    if kind in FLOATS:
        return stored.float()
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType(kind)))
