"""What LoRA adapters change in a layer, for the rows of a step that are theirs.

`quire.lora` fills these in; a layer that no resident adapter changes has none. Which rows belong to whom is known for
the whole model at once (`LoRAContext`): it cannot come with a layer's arguments, since the layers of a vision tower are
called by transformers' code. Without adapters in a step, `LoRAContext.segments` is None and a layer does not look
further.

Plain LoRA goes to the `linear` kernel. What replaces weights instead (saved modules, trained tokens and embeddings) is
computed anew for its rows, through the same kernels as for everybody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights
from quire.kernels.transfer import send
from quire.layers.rows import current_segments


class LoRAContext:
    """Who owns which rows of what runs now: one for all layers of a model.

    Rows are tokens in the layers, sampled rows in the projection to the vocabulary, patches in a vision tower; where a
    model says so (`rows.py`), heads of tokens, or some tokens in any order.
    """

    __slots__ = ("segments",)

    def __init__(self) -> None:
        self.segments: LoraSegments | None = None

    def for_rows(self, count: int, layer: str) -> LoraSegments:
        """Who owns which of a layer's `count` rows, while there are segments.

        Raises ValueError, which names the layer, where that is not known.
        """
        assert self.segments is not None
        try:
            return current_segments(self.segments).for_rows(count)
        except ValueError as error:
            raise ValueError(f"{layer}: {error}") from None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of a table that an adapter trained anew. ids: [n] int64, ascending; rows: [n, C].

    bias, lora: of a Linear, what is added to the product with the rows.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    bias: torch.Tensor | None = None
    lora: LoraWeights | None = None


@dataclass(frozen=True, slots=True)
class LinearChange:
    """An adapter's share of a Linear. weight, bias: in the place of the layer's own."""

    lora: LoraWeights | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    tokens: TokenRows | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingChange:
    """An adapter's share of an Embedding: row v becomes (weight[v] + scaling * a[v] b^T) * scale.

    weight: [V, C] in the place of the layer's own; tokens: rows of it. a: [V, rank], b: [C, rank]; scale: [C] float32.
    """

    weight: torch.Tensor | None = None
    tokens: TokenRows | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scaling: float = 1.0
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class NormChange:
    """weight, bias: in the place of the layer's own."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def on_device(change: Any, columns: int, device: torch.device, row_major: bool) -> Any:
    """The same change as the kernels of a device read it; columns: the layer's out-features.

    row_major: whether they take B as it is, see `LoraWeights`.
    """
    if device.type == "cpu" and not row_major:
        return change
    if isinstance(change, torch.Tensor):
        return send(change, device)
    if isinstance(change, LoraWeights):
        return change.for_device(columns, device, row_major)
    if not dataclasses.is_dataclass(change) or isinstance(change, type):
        return change
    own = len(change.ids) if isinstance(change, TokenRows) else columns
    parts = {part.name: getattr(change, part.name) for part in dataclasses.fields(change)}
    return dataclasses.replace(
        change, **{name: on_device(value, own, device, row_major) for name, value in parts.items()}
    )


_Change = TypeVar("_Change", EmbeddingChange, NormChange)


@dataclass(frozen=True, slots=True)
class LinearAdapters:
    """The adapters of one Linear, the module `name`.

    table: their LoRA weights. replaced: by slot, what else they change; tokens: the LoRA weights of trained rows, in
    slot 0 of a table for each slot.
    """

    context: LoRAContext
    name: str
    table: LoraTable
    replaced: dict[int, LinearChange] = field(default_factory=dict)
    tokens: dict[int, LoraTable] = field(default_factory=dict)

    def put(self, slot: int, change: LinearChange) -> bool:
        """Fill a slot; True when recordings that read the table must go."""
        if change.weight is not None or change.tokens is not None:
            self.replaced[slot] = change
        if change.tokens is not None:
            own = self.table
            table = LoraTable(own.in_features, len(change.tokens.ids), own.dtype, 1, own.device, own.row_major)
            if change.tokens.lora is not None:
                table.put(0, change.tokens.lora)
            self.tokens[slot] = table
        return change.lora is not None and self.table.put(slot, change.lora)

    def grow(self, slots: int) -> None:
        """Have so many slots, if there are fewer."""
        self.table.grow(slots)

    def drop(self, slot: int) -> None:
        self.replaced.pop(slot, None)
        self.tokens.pop(slot, None)
        self.table.drop(slot)


@dataclass(frozen=True)
class SlotAdapters(Generic[_Change]):
    """The adapters of one Embedding or norm, the module `name`, by slot."""

    context: LoRAContext
    name: str
    changes: dict[int, _Change] = field(default_factory=dict)

    def put(self, slot: int, change: _Change) -> bool:
        """Fill a slot. No recording reads it: False."""
        self.changes[slot] = change
        return False

    def drop(self, slot: int) -> None:
        self.changes.pop(slot, None)


EmbeddingAdapters = SlotAdapters[EmbeddingChange]
NormAdapters = SlotAdapters[NormChange]


def adapt_embedding(
    adapters: EmbeddingAdapters,
    look_up: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    added: torch.Tensor | None,
    y: torch.Tensor,
    table_scale: float = 1.0,
) -> None:
    """Change y [T, C] for the rows of the active segments: the rows `ids` [T] of a table, times `table_scale`, plus
    `added` [T, C]. look_up: from ids [n] to the table's rows [n, C]."""
    for start, end, slot, weight in adapters.context.for_rows(len(ids), adapters.name).rows:
        change = adapters.changes.get(slot)
        if change is None or end <= start:
            continue
        own = ids[start:end]
        delta = 0 if change.a is None or change.b is None else _low_rank(change, own, weight)
        if change.weight is None and change.tokens is None and change.scale is None:
            # On top of what a mixture has already added.
            y[start:end] = (y[start:end].float() + delta * table_scale).to(y.dtype)
            continue
        rows = (look_up(own) if change.weight is None else kernels.embedding(own, change.weight)).float()
        if change.tokens is not None:
            place = torch.searchsorted(change.tokens.ids, own).clamp_(max=len(change.tokens.ids) - 1)
            trained = change.tokens.ids[place] == own
            rows = torch.where(trained.unsqueeze(1), change.tokens.rows[place].float(), rows)
        rows = rows + delta
        if change.scale is not None:
            rows = rows * change.scale
        if table_scale != 1.0:
            rows = rows * table_scale
        if added is not None:
            rows = rows.to(y.dtype).float() + added[start:end].float()
        y[start:end] = rows.to(y.dtype)


def _low_rank(change: EmbeddingChange, ids: torch.Tensor, weight: float) -> torch.Tensor:
    """[n, C] float32"""
    assert change.a is not None and change.b is not None
    hidden = kernels.embedding(ids, change.a)
    return kernels.linear(hidden, (change.b,), (None,), torch.float32) * (change.scaling * weight)


def adapt_norm(
    adapters: NormAdapters, x: torch.Tensor, y: torch.Tensor, norm: Callable[[torch.Tensor, NormChange], torch.Tensor]
) -> None:
    """Do the rows of x, [T, C] or [T, H, D], over whose norm an adapter changes: y[rows] = norm(x[rows], change)."""
    for start, end, slot, _ in adapters.context.for_rows(len(y), adapters.name).rows:
        change = adapters.changes.get(slot)
        if change is not None and end > start:
            y[start:end] = norm(x[start:end], change)
