"""Multi-head latent attention (arXiv:2405.04434): keys and values of all heads are made of one row a token, its latent.

The pool keeps a token's latent and, behind it, the part of the keys that all heads share and that turns. What would
make keys and values of latents, kv_b_proj, is *absorbed*: a head's query is multiplied by the keys' part of it before
attention, and what attention gives, a mixture of latents, by the values' part. Of R numbers in a latent, n and v in a
head's key and value, and W_k [n, R] and W_v [v, R] of that head:

    score = (q W_k) latent + turned q * turned key        output = W_v (the latents, by their shares)

This is done for a prompt's chunks and for single tokens alike: a row's bits must not depend on how many share the step.

Heads are to the kernels what experts are: each has weights of its own, and rows are sorted by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from quire import kernels
from quire.kernels.adapters import LoraTable, LoraWeights, pack, unpack
from quire.kernels.experts import ExpertWeights
from quire.kernels.transfer import send
from quire.layers.adapters import LinearChange, LoRAContext
from quire.layers.linear import Linear
from quire.layers.rotary import RotaryEmbedding, RotaryTable
from quire.layers.weight_formats import FLOAT_ROWS
from quire.types import ForwardContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A table of heads' numbers is made for so many tokens at first: more than a step of one token a sequence has.
_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LatentTable(RotaryTable):
    """One step's rotation, and its rows sorted by head: what `kernels.sort_by_expert` writes of heads.

    starts: [H + 1] int32, tokens: [H T] int64.
    """

    starts: torch.Tensor = field(kw_only=True)
    tokens: torch.Tensor = field(kw_only=True)


class LatentRotary(RotaryEmbedding):
    """A RotaryEmbedding that makes each step's LatentTable, for layers of `heads` heads. The others: as of
    RotaryEmbedding."""

    def __init__(
        self, config: PretrainedConfig, heads: int, *, interleaved: bool, first: int, head_dim: int, **settings: Any
    ) -> None:
        super().__init__(config, interleaved=interleaved, first=first, head_dim=head_dim, **settings)
        self._heads = heads
        self._numbers: dict[torch.device, torch.Tensor] = {}
        self._outgrown_numbers: list[torch.Tensor] = []  # recorded steps know a table by its address

    def __call__(self, ctx: ForwardContext) -> LatentTable:
        rope = super().__call__(ctx)
        tokens, heads, device = len(ctx.positions), self._heads, ctx.positions.device
        starts = torch.empty((heads + 1,), dtype=torch.int32, device=device)
        owners = torch.empty((heads * tokens,), dtype=torch.int64, device=device)
        places = torch.empty((tokens, heads), dtype=torch.int32, device=device)
        kernels.sort_by_expert(self._numbered(tokens, device)[:tokens], starts, owners, places)
        return LatentTable(rope.rows, rope.cos_sin, rope.interleaved, rope.first, starts=starts, tokens=owners)

    def _numbered(self, tokens: int, device: torch.device) -> torch.Tensor:
        """[at least `tokens`, H] int32: 0, 1 .. H - 1 in each row."""
        table = self._numbers.get(device)
        if table is None or len(table) < tokens:
            if device.type == "meta":  # a rehearsal's: nothing of it is kept
                return torch.empty((tokens, self._heads), dtype=torch.int32, device=device)
            if table is not None:
                self._outgrown_numbers.append(table)
            rows = max(tokens, _TOKENS, 0 if table is None else 2 * len(table))
            numbers = torch.arange(self._heads, dtype=torch.int32, device=device)
            table = self._numbers[device] = numbers.repeat(rows, 1)
        return table


class LatentProjection(Linear):
    """kv_b_proj, [H (n + v), R]: of each head first what makes its key of a latent, then what makes its value.

    It is never called: `queries` and `outputs` are its products. `absorb` comes before them.
    """

    packs = False
    adapters: LatentAdapters | None = None  # type: ignore[assignment]  # what else may be changed is refused

    def __init__(self, rank: int, heads: int, key: int, value: int, query_layer: str) -> None:
        """rank: R; key, value: n and v. query_layer: the name, beside this layer's, of the one that makes queries,
        whose rows are of each head n that do not turn and then those that do."""
        super().__init__(rank, heads * (key + value), bias=False)
        self.heads, self.rank, self.key, self.value = heads, rank, key, value
        self.query_layer = query_layer
        self._turned: torch.Tensor | None = None
        self._weights: tuple[ExpertWeights, ExpertWeights] | None = None
        self._read_from: tuple[object, ...] = ()

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        raise NotImplementedError("queries and outputs are this layer's products")

    @property
    def turned_shape(self) -> tuple[int, int, int]:
        """Of what `absorb` fills: the keys' parts of all heads, transposed."""
        return self.heads, self.rank, self.key

    def absorb(self, turned: torch.Tensor) -> None:
        """Write the keys' part of the weight, transposed, to `turned` (of `turned_shape`), and multiply by that."""
        turned.copy_(self._by_head(self.weight.data)[:, : self.key].transpose(1, 2))
        self._turned = turned

    def queries(self, x: torch.Tensor, table: LatentTable) -> torch.Tensor:
        """x: [T, H, n], the queries' parts that do not turn, heads contiguous -> [T, H, R], heads contiguous."""
        return self._products(x, 0, table).transpose(0, 1)

    def outputs(self, x: torch.Tensor, table: LatentTable) -> torch.Tensor:
        """x: [T, H, R], mixtures of latents, heads contiguous -> [T, H v], contiguous."""
        y = self._products(x, 1, table)
        if len(x) > 1:
            y = kernels.join_heads(y.transpose(0, 1))
        return y.view(len(x), -1)

    def _products(self, x: torch.Tensor, part: int, table: LatentTable) -> torch.Tensor:
        """x: [T, H, K] -> [H, T, N], contiguous, each head by its own weight. part: 0: the keys', 1: the values'."""
        tokens, heads, features = x.shape
        rows = x[0] if tokens == 1 else kernels.join_heads(x.transpose(0, 1)).view(heads * tokens, features)
        weights, adapters = self._parts()[part], self.adapters
        if adapters is None or adapters.context.segments is None:
            y = kernels.grouped_linear(rows, table.starts, table.tokens, weights)
        else:
            segments = adapters.context.for_rows(tokens, adapters.name)
            tables = adapters.values if part else adapters.keys
            y = kernels.grouped_linear(rows, table.starts, table.tokens, weights, tables, segments)
        return y.view(heads, tokens, -1)

    def _parts(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Of keys and of values, looked up once: they do not move once they are loaded."""
        weight = self._parameters["weight"]
        assert weight is not None
        turned = self._turned
        read_from = weight.data_ptr(), None if turned is None else turned.data_ptr(), weight.dtype, weight.device
        if self._weights is None or read_from != self._read_from:
            if self.format is not FLOAT_ROWS:
                raise NotImplementedError("weights that are absorbed are rows of floats")
            if weight.is_meta:  # a rehearsal's
                turned = weight.new_empty(self.turned_shape)
            if turned is None:
                raise RuntimeError("absorb has not been called")
            values = self._by_head(weight.data)[:, self.key :]
            self._weights = ExpertWeights([[one] for one in turned]), ExpertWeights([[one] for one in values])
            self._read_from = read_from
        return self._weights

    def _by_head(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view(self.heads, self.key + self.value, self.rank)

    def new_adapters(
        self, context: LoRAContext, name: str, dtype: torch.dtype, slots: int, device: torch.device, row_major: bool
    ) -> LatentAdapters:
        """Empty tables of so many slots, for the layer's adapters."""

        def tables(features: int, columns: int) -> list[list[LoraTable | None]]:
            sizes = features, columns, dtype, slots, device, row_major
            return [[LoraTable(*sizes)] for _ in range(self.heads)]

        return LatentAdapters(context, name, tables(self.key, self.rank), tables(self.rank, self.value))

    def by_head(self, change: LinearChange) -> LatentChange | None:
        """An adapter's share of the whole layer, as it comes from a file.

        Of DoRA's scale, a key's number times c is a query's times c. A shift of keys adds the same to all scores of a
        query, and so changes none of its shares. Raises ValueError for a change of another kind.
        """
        lora = change.lora
        if change.weight is not None or change.tokens is not None:
            raise ValueError("its weights take LoRA, and cannot be replaced: queries and outputs have absorbed them")
        if lora is None or lora.a is None or lora.b is None:
            return None
        by_head = self.heads, self.key + self.value
        b = unpack(lora.b, self.out_features).view(*by_head, lora.rank)
        scale, shift = (None if part is None else part.view(by_head) for part in (lora.scale, lora.shift))
        return LatentChange(
            key_a=b[:, : self.key].transpose(1, 2).contiguous(),
            key_b=pack(lora.a.t().contiguous()),
            value_a=lora.a,
            value_b=torch.stack([pack(one) for one in b[:, self.key :]]),
            scaling=lora.scaling,
            value_scale=None if scale is None else scale[:, self.key :].contiguous(),
            value_shift=None if shift is None else shift[:, self.key :].contiguous(),
            key_scale=None if scale is None else scale[:, : self.key].contiguous(),
        )


@dataclass(frozen=True, slots=True)
class LatentChange:
    """An adapter's share of a LatentProjection, whose A is [rank, R] and of each head B_k [n, rank] and B_v [v, rank].

    A query's product with W_k + B_k A is a layer's with LoRA whose A is B_k^T and whose B is A^T.
    key_a: [H, rank, n]; key_b: A^T, value_a: A, of all heads; value_b: B_v of each; `pack` of what stands for a B, or,
    where `row_major`, as it is (on a GPU). value_scale, value_shift: [H, v] float32 or None. key_scale: [H, n] float32,
    until what makes the queries has it.
    """

    key_a: torch.Tensor
    key_b: torch.Tensor
    value_a: torch.Tensor
    value_b: torch.Tensor
    scaling: float
    value_scale: torch.Tensor | None = None
    value_shift: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    row_major: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is LoRA alone."""
        return self.value_scale is None and self.value_shift is None

    def for_device(self, layer: LatentProjection, device: torch.device, row_major: bool) -> LatentChange:
        """The same share, as that device's kernels read it."""
        if row_major == self.row_major and device.type == "cpu":
            return self
        key_b, value_b = self.key_b, self.value_b
        if row_major and not self.row_major:
            key_b = unpack(key_b, layer.rank).contiguous()
            value_b = torch.stack([unpack(one, layer.value) for one in value_b])
        key_a, key_b, value_a, value_b = (send(one, device) for one in (self.key_a, key_b, self.value_a, value_b))
        scale, shift = (None if one is None else send(one, device) for one in (self.value_scale, self.value_shift))
        return LatentChange(key_a, key_b, value_a, value_b, self.scaling, scale, shift, row_major=row_major)

    def heads(self) -> Iterator[tuple[LoraWeights, LoraWeights]]:
        """Of each head, the shares of the keys' part and of the values'."""
        for head, (key_a, value_b) in enumerate(zip(self.key_a, self.value_b, strict=True)):
            scale, shift = (None if one is None else one[head] for one in (self.value_scale, self.value_shift))
            yield (
                LoraWeights(key_a, self.key_b, self.scaling, row_major=self.row_major),
                LoraWeights(self.value_a, value_b, self.scaling, scale, shift, self.row_major),
            )


@dataclass(frozen=True, slots=True)
class LatentAdapters:
    """The adapters of one LatentProjection, the module `name`. keys, values: a table for each head, in a list."""

    context: LoRAContext
    name: str
    keys: Sequence[Sequence[LoraTable | None]]
    values: Sequence[Sequence[LoraTable | None]]

    def _tables(self) -> list[tuple[LoraTable, LoraTable]]:
        pairs = zip(self.keys, self.values, strict=True)
        return [(key, value) for (key,), (value,) in pairs if key is not None and value is not None]

    def put(self, slot: int, change: LatentChange) -> bool:
        """Fill a slot; True when recordings that read the tables must go."""
        moved = False
        for (keys, values), (key, value) in zip(self._tables(), change.heads(), strict=True):
            moved |= keys.put(slot, key)
            moved |= values.put(slot, value)
        return moved

    def grow(self, slots: int) -> None:
        """Have so many slots, if there are fewer."""
        for tables in self._tables():
            for table in tables:
                table.grow(slots)

    def drop(self, slot: int) -> None:
        for tables in self._tables():
            for table in tables:
                table.drop(slot)
