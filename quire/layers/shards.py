"""One model computed by several processes: each multiplies by its rows of every matrix, and attends with its heads.

What a process computes is never added to what another computes. It is put beside it, and goes on whole: every sum is
one process's, in the order in which a single process adds, and so every number has the very bits that it has there.
(Matrices that are cut along what is summed over would need less to be exchanged, and other sums.) What is neither a
Linear's product nor attention over the pool, every process computes for itself.

A Linear is cut by its format: `SharedRows` stands in the place of the one that the checkpoint has. `PagedAttention` is
given the heads that are its own (`HeadShare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from quire.kernels import packed
from quire.kernels.adapters import PACKED_COLUMNS, LoraSegments, LoraTable
from quire.kernels.exchange import Columns, Exchange
from quire.layers.weight_formats import FLOAT_ROWS, Layer, WeightFormat
from quire.types import AttentionSpec


def cut(count: int, size: int, unit: int = 1) -> list[int]:
    """Where `size` processes' shares of `count` begin, and the end: as equal as whole units are."""
    units = -(-count // unit)
    return [min(units * rank // size * unit, count) for rank in range(size + 1)]


@dataclass(frozen=True)
class Shard:
    """A process's place among those that compute one model. rank: from 0."""

    rank: int
    size: int
    exchange: Exchange

    def rows_of(self, count: int) -> tuple[int, int]:
        """This process's of a Linear's `count` rows: whole runs of those that an adapter's B is packed by."""
        ends = cut(count, self.size, PACKED_COLUMNS)
        return ends[self.rank], ends[self.rank + 1]

    def gather(self, own: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """own: [T, n], this process's rows' products with x, of layers of so many out-features side by side -> all."""
        return self.exchange.gather(own, _columns(counts, self.size))


_known: dict[tuple[tuple[int, ...], int], Columns] = {}  # recorded steps know a table by its address


def _columns(counts: tuple[int, ...], size: int) -> Columns:
    known = _known.get((counts, size))
    if known is None:
        ends = [cut(count, size, PACKED_COLUMNS) for count in counts]
        known = _known[counts, size] = Columns([[b - a for a, b in pairwise(own)] for own in ends])
    return known


class OwnRows:
    """What a format sees of a Linear of which one process has these rows."""

    def __init__(self, layer: Any, format: WeightFormat, first: int, end: int) -> None:
        self.in_features, self.out_features = layer.in_features, end - first
        self.format = format
        weight, bias = (layer._parameters[name] for name in ("weight", "bias"))
        self._parameters: dict[str, Any] = {
            "weight": packed.slice_rows(weight.data, first, end),
            "bias": None if bias is None else bias.data[first:end],
        }
        self._buffers = layer._buffers

    @property
    def weight(self) -> torch.Tensor:
        own = self._parameters["weight"]
        assert own is not None
        return own


class SharedRows:
    """The format of a Linear of which this process has some rows. inner: that of its weights.

    One object for all layers of a format.
    """

    def __init__(self, inner: WeightFormat, shard: Shard) -> None:
        self.inner, self.shard = inner, shard

    def add_tensors(self, layer: Layer, bias: bool) -> None:
        self.inner.add_tensors(layer, bias)

    def multiply(
        self,
        x: torch.Tensor,
        layers: Sequence[Layer],
        out_dtype: torch.dtype | None = None,
        tables: Sequence[LoraTable | None] = (),
        segments: LoraSegments | None = None,
    ) -> torch.Tensor:
        own = [own_rows(layer) for layer in layers]
        some = [number for number, one in enumerate(own) if one.out_features]
        if some:
            inner = next((own[i].format for i in some if own[i].format is not FLOAT_ROWS), FLOAT_ROWS)
            given = [tables[i] for i in some] if tables else ()
            y = inner.multiply(x, [own[i] for i in some], out_dtype, given, segments)  # type: ignore[misc]
        else:
            y = torch.empty((x.shape[0], 0), dtype=out_dtype or x.dtype, device=x.device)
        return self.shard.gather(y, tuple(layer.out_features for layer in layers))

    def nbytes(self, layer: Layer) -> int:
        return self.inner.nbytes(layer)

    def rows(self, layer: Layer, first: int, end: int) -> torch.Tensor:
        return self.inner.rows(layer, first, end)


def shard_of(layer: Any) -> Shard | None:
    """Whose place a Linear's rows are cut by; None: it is whole."""
    return layer.format.shard if isinstance(layer.format, SharedRows) else None


def own_rows(layer: Any) -> OwnRows:
    """This process's rows of a Linear, looked up once: weights do not move once they are loaded."""
    weight = layer._parameters["weight"]
    kept = layer.__dict__.get("_own_rows")
    if kept is None or kept[0] != weight.data_ptr():
        first, end = layer.format.shard.rows_of(layer.out_features)
        kept = layer.__dict__["_own_rows"] = weight.data_ptr(), OwnRows(layer, layer.format.inner, first, end)
    rows: OwnRows = kept[1]
    return rows


@dataclass(frozen=True)
class HeadShare:
    """One process's part of a layer's attention: heads of queries first .. end, of keys kv_first .. kv_end.

    columns: of all processes' results side by side.
    """

    spec: AttentionSpec
    first: int
    end: int
    kv_first: int
    kv_end: int
    shard: Shard
    columns: Columns

    @classmethod
    def of(cls, spec: AttentionSpec, shard: Shard) -> HeadShare | None:
        """None where heads cannot be shared out: every process attends with all of them then.

        Where there are as many heads of keys as processes, each has some; where there are fewer, several have the same
        one, and some of its queries.
        """
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, shard.size
        group = heads // kv_heads
        if kv_heads >= size:
            kv = cut(kv_heads, size)
            queries = [head * group for head in kv]
        elif size % kv_heads == 0 and group >= size // kv_heads:
            each = size // kv_heads  # processes that have the same head of keys
            parts = cut(group, each)
            queries = [head * group + part for head in range(kv_heads) for part in parts[:-1]] + [heads]
            kv = [rank // each for rank in range(size + 1)]
        else:
            return None
        first, end = queries[shard.rank], queries[shard.rank + 1]
        kv_first = kv[shard.rank]
        kv_end = max(kv[shard.rank + 1], kv_first + 1)
        value = spec.value_dim or spec.head_dim
        columns = Columns([[(b - a) * value for a, b in pairwise(queries)]])
        own = replace(
            spec,
            num_heads=end - first,
            num_kv_heads=kv_end - kv_first,
            scale=spec.scale[first:end] if isinstance(spec.scale, tuple) else spec.scale,
            alibi_slopes=spec.alibi_slopes[first:end],
        )
        return cls(own, first, end, kv_first, kv_end, shard, columns)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """own: [T, this process's heads' values side by side] -> [T, num_heads * value_dim]."""
        return self.shard.exchange.gather(own, self.columns)
