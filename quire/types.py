"""The frozen types that pass between rooms.

T: tokens in the step; S: sequences in the step; B: most blocks of any of them; R: rows whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.media_types import (
    MEDIA_KINDS,
    Grid,
    ImageLayout,
    MarkerWords,
    MediaKind,
    MediaLayout,
    PlaceholderRange,
    Span,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "MEDIA_KINDS",
    "STATE",
    "AdapterRef",
    "AdapterUse",
    "AttentionSpec",
    "ForwardContext",
    "Grid",
    "ImageLayout",
    "KVCache",
    "KVGroup",
    "KVSpec",
    "MarkerWords",
    "MediaKind",
    "MediaLayout",
    "PlaceholderRange",
    "Span",
    "StateCache",
    "StateSpec",
    "WholePrompts",
]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes: causal, over the keys and values that its sequence has in the KV pool.

    num_heads: of queries; num_kv_heads: of keys and of values, each of which serves num_heads / num_kv_heads of them.
    head_dim: size of one query or key. scale: of a query's product with a key, or one for each head of queries; None:
    1 / sqrt(head_dim). window: keys that a token sees, its own the last; 0: all before it. alibi_slopes: one for each
    head of queries (arXiv:2108.12409), or none. value_dim: size of one value; None: head_dim. softcap: scores become
    softcap * tanh(score / softcap), before slopes are added; 0: they stay. sinks: each head has one more score, a
    parameter of the model's, whose value is 0. latent: values are the first value_dim numbers of the keys' own rows,
    and no other tensor has them (arXiv:2405.04434). chunk: positions are cut into chunks of so many, and a token sees
    the keys of its own alone; 0: they are not. biases: scores get a number of the model's by head and distance.

    Each field is an argument of `kernels.paged_attention`; any may be combined. What no kernel computes has no field.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | tuple[float, ...] | None = None
    window: int = 0
    alibi_slopes: tuple[float, ...] = ()
    value_dim: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False
    chunk: int = 0
    biases: bool = False

    @property
    def reach(self) -> int:
        """Keys that a token sees at most, its own the last; 0: all before it."""
        return min((keys for keys in (self.window, self.chunk) if keys), default=0)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        for name, keys in (("window", self.window), ("chunk", self.chunk)):
            if keys < 0:
                raise ValueError(f"{name}={keys}: must be a number of keys, or 0 for all")
        if self.alibi_slopes and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"alibi_slopes has {len(self.alibi_slopes)} numbers for num_heads={self.num_heads}")
        if isinstance(self.scale, tuple) and len(self.scale) != self.num_heads:
            raise ValueError(f"scale has {len(self.scale)} numbers for num_heads={self.num_heads}")
        if self.value_dim is not None and self.value_dim < 1:
            raise ValueError(f"value_dim={self.value_dim}: must be the size of a value, or None for head_dim")
        if self.latent and (self.value_dim or self.head_dim) > self.head_dim:
            raise ValueError(f"value_dim={self.value_dim}: a part of the keys has at most head_dim={self.head_dim}")
        if not 0.0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap={self.softcap}: must be a number above 0, or 0 for none")


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same tokens, in blocks of one shape: one block table serves them all.

    layers: their numbers, ascending. window: tokens that are kept, the next one to compute among them; 0: all. The
    others are fields of `KVSpec`.
    """

    layers: Sequence[int]
    num_kv_heads: int
    head_dim: int
    window: int = 0
    value_dim: int | None = None
    latent: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a layer with a state instead of keys keeps of a sequence: one state, whatever its length (arXiv:2405.21060).

    num_heads, head_dim, state_size: of the state, float32. channels, kernel: of the convolution before it, whose last
    `kernel` - 1 inputs are kept in the model's dtype.
    """

    num_heads: int
    head_dim: int
    state_size: int
    channels: int
    kernel: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_dim, self.state_size, self.channels) < 1 or self.kernel < 2:
            raise ValueError(f"{self}: sizes must be 1 at least, and the convolution's 2")

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
        """Of `StateCache.states`, of its tails and of the ends of both, for so many blocks."""
        states = blocks, 2, self.num_heads, self.state_size, self.head_dim
        return states, (blocks, 2, self.kernel - 1, self.channels), (blocks, 2)


# In the place of a group's window: its layers have states.
STATE = -1

# Where the size of groups is chosen: a layer that keeps all keeps so many times what one with a window does. A group
# has a block table in every step, which is worth one such part of the memory.
_FULL_IN_WINDOWS = 8
_PARTS_TO_A_GROUP = 32


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model asks of the KV pool; the model says it, the engine allocates by it.

    head_dim is the size of one key, and of one value unless `value_dim` is; every layer has the same. windows: the
    `reach` of each layer's `AttentionSpec`; empty: all see all before them. latent: as of `AttentionSpec`: a row has a
    key alone.
    num_states: layers that have states, counted by themselves, which are as `state` says; None: there are none.
    int8: rows are kept as `KVCache.of_rows` has them, and not in the model's dtype; the engine says so, no model does.
    own: the layers that this process keeps something of, where others compute the rest; None: all. Groups are those of
    the whole model: a block has one number, whoever keeps a part of it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = ()
    value_dim: int | None = None
    latent: bool = False
    num_states: int = 0
    state: StateSpec | None = None
    int8: bool = False
    own: range | None = None

    @classmethod
    def of(cls, layers: Iterable[AttentionSpec]) -> KVSpec:
        """What layers of these specs ask for. Raises ValueError where blocks of one shape would not serve them all."""
        specs = list(layers)
        kept = {(spec.num_kv_heads, spec.head_dim, _value_dim(spec), spec.latent) for spec in specs}
        if len(kept) > 1:
            raise ValueError(
                "its layers keep different things of a token, (key heads, size of a key, of a value, whether that is a "
                f"part of the key): {sorted(kept)}"
            )
        windows = tuple(spec.reach for spec in specs)
        heads, key, value, latent = kept.pop() if kept else (0, 0, 0, False)
        return cls(len(specs), heads, key, windows if any(windows) else (), None if value == key else value, latent)

    def bytes_a_token(self, itemsize: int) -> int:
        """How many a layer keeps of a token. itemsize: of the model's dtype."""
        sizes = (self.head_dim,) if self.latent else (self.head_dim, self.value_dim or self.head_dim)
        return self.num_kv_heads * sum(int8_row_bytes(size) if self.int8 else size * itemsize for size in sizes)

    def within(self, length: int) -> KVSpec:
        """The same for sequences of at most `length` tokens: a window that none of them leaves is none."""
        windows = tuple(window if window < length else 0 for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The layers by the tokens that they keep, those that keep all first.

        Groups have the same number of layers, so that a block of any group takes the same memory; the last of those
        with one window may have fewer. Where that wastes more than windows save, there is one group that keeps all.
        """
        if not self.windows:
            return (self._group(range(self.num_layers), 0),)
        alike = {
            window: [layer for layer, own in enumerate(self.windows) if own == window]
            for window in sorted(set(self.windows), key=lambda window: (window > 0, -window))
        }
        size = _layers_a_group({window: len(layers) for window, layers in alike.items()})
        if size > max(map(len, alike.values())):
            alike = {0: list(range(self.num_layers))}
        return tuple(
            self._group(tuple(layers[first : first + size]), window)
            for window, layers in alike.items()
            for first in range(0, len(layers), size)
        )

    @property
    def layers_a_block(self) -> int:
        """Layers that this process keeps something of in a block, at most."""
        return max(sum(self.keeps(layer) for layer in group.layers) for group in self.groups)

    def keeps(self, layer: int) -> bool:
        """Whether the layer is one of `own`."""
        return self.own is None or layer in self.own

    @property
    def group_windows(self) -> tuple[int, ...]:
        """Of each group, as the caches number them; STATE for that of the layers with states, which is the last."""
        states = () if self.state is None else (STATE,)
        return (*(group.window for group in self.groups), *states)

    def _group(self, layers: Sequence[int], window: int) -> KVGroup:
        return KVGroup(layers, self.num_kv_heads, self.head_dim, window, self.value_dim, self.latent)


def _value_dim(spec: AttentionSpec) -> int:
    return spec.value_dim or spec.head_dim


def _layers_a_group(counts: Mapping[int, int]) -> int:
    """How many layers a group has, for so many layers of each window: what takes little memory in few groups. All
    layers, where windows save less than they cost."""
    weights = {window: 1 if window else _FULL_IN_WINDOWS for window in counts}

    def cost(size: int) -> int:
        groups = {window: -(-count // size) for window, count in counts.items()}
        memory = sum(size * groups[window] * weights[window] for window in counts)
        return memory * (_PARTS_TO_A_GROUP + sum(groups.values()))

    total = sum(counts.values())
    best = min(range(max(counts.values()), 0, -1), key=cost)
    return best if cost(best) <= total * max(weights.values()) * (_PARTS_TO_A_GROUP + 1) else total


def int8_row_bytes(dim: int) -> int:
    """Of a row of int8: its numbers, up to a multiple of 4, and its scale."""
    return (dim + 3) // 4 * 4 + 4


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's share of the block pool. The engine allocates it once; models hand it to the kernels.

    keys, values: [num_blocks, num_kv_heads, block_size, head_dim], the model's dtype or int8; of a `latent` spec,
    values are the first columns of keys. Slot s of the pool is token `s % block_size` of block `s // block_size`.
    Layers of other groups may have the same tensors, in which no block is both's. group: the number of the layer's
    `KVGroup`, whose slots and block table are its own.
    key_scales, value_scales: [num_blocks, num_kv_heads, block_size, 1] float32, what rows of int8 are to be multiplied
    by; None: keys and values are floats. rows: the tensors of which these are parts; empty: keys and values are whole.
    """

    keys: torch.Tensor
    values: torch.Tensor
    group: int = 0
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    rows: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of_rows(
        cls, keys: torch.Tensor, values: torch.Tensor, head_dim: int, value_dim: int, group: int = 0
    ) -> KVCache:
        """keys, values: [num_blocks, num_kv_heads, block_size, `int8_row_bytes`] int8, contiguous: each row's numbers,
        and in its last four bytes its scale; of a latent spec, the same tensor."""
        import torch

        key_scales, value_scales = (rows.view(torch.float32)[..., -1:] for rows in (keys, values))
        return cls(keys[..., :head_dim], values[..., :value_dim], group, key_scales, value_scales, (keys, values))

    @property
    def whole(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose bytes, block by block, are all that the pool has of the layer."""
        return self.rows or (self.keys, self.values)


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's states of all sequences. The engine allocates it once; models hand it to the kernels.

    A block of the layer's group holds no run of tokens, but what is left of a sequence behind the last token that was
    computed of such a run. It has room for two, so that a step reads one and writes the other: it can be run again.

    states: [N, 2, num_heads, state_size, head_dim] float32. tails: [N, 2, kernel - 1, channels], the model's dtype.
    state_ends, tail_ends: [N, 2] int64, how many tokens each of them is behind; -1: nothing is there. block_size: of a
    run of tokens. group: as of `KVCache`. Raises ValueError where numbers of blocks differ.
    """

    states: torch.Tensor
    tails: torch.Tensor
    state_ends: torch.Tensor
    tail_ends: torch.Tensor
    block_size: int
    group: int = 0

    def __post_init__(self) -> None:
        if len({len(tensor) for tensor in self.tensors}) > 1:
            raise ValueError("a layer's states and what comes with them must have the same blocks")

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.states, self.tails, self.state_ends, self.tail_ends


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """The prompts of a step of which all tokens see one another, and which are longer than some layer's window.

    rows: [V] int64, their tokens in the step. sequences: [P] int64, whose they are. query_start: [P + 1] int32, prompt
    p's tokens among `rows`; context_len: [P] int32, how many they are. visible_end: [V] int32, as of `ForwardContext`.
    """

    rows: torch.Tensor
    sequences: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    visible_end: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The batch's metadata for one step; `platform/execution/batch.py` writes it, layers and kernels read it."""

    positions: torch.Tensor  # [T] int64: each token's position in its sequence
    query_start: torch.Tensor  # [S + 1] int32: sequence s owns tokens query_start[s] : query_start[s + 1]
    context_len: torch.Tensor  # [S] int32: tokens of s that are in the cache once this step has written its own
    prompt_len: torch.Tensor  # [S] int32: length of s's prompt (length-dependent rotary embeddings need it)
    slot_mapping: torch.Tensor  # [T] int64: the pool slot that takes each token's key and value
    # [S, B] int32: s's blocks in order; entries past its last block are not read, nor those wholly before a window.
    block_table: torch.Tensor
    position_limit: int  # every position is below it: a power of two, so that it seldom differs between steps
    longest: int  # of context_len and prompt_len, as a number: nobody needs to wait for a GPU to know
    # [T] int32: each token sees its sequence's positions below this one, its own among them; None: up to its own.
    # Within a sequence it does not decrease.
    visible_end: torch.Tensor | None = None
    # For models with `mrope` alone: what each token turns by, [T] int64, or [3, T] where time, height and width differ.
    rotary_positions: torch.Tensor | None = None
    # Where layers form several groups, what the two above are for the first of them, for the others in their order:
    # [G - 1, T] and [G - 1, S, B].
    group_slots: torch.Tensor | None = None
    group_tables: torch.Tensor | None = None
    # For models with types of tokens alone: each token's, [T] int64; None: all are of the first.
    token_types: torch.Tensor | None = None
    # Where padding has a position of its own: each token's row of the table, [T] int64; None: there is no padding.
    position_rows: torch.Tensor | None = None
    # With `feature_levels`, if there are features: their rows, [V] int64, and what each layer adds, [levels, V, E].
    level_rows: torch.Tensor | None = None
    level_features: torch.Tensor | None = None
    # Their tokens see one another in every layer, whatever its window. None: there are no such prompts in the step.
    whole_prompts: WholePrompts | None = None

    def slots_of(self, group: int) -> torch.Tensor:
        """`slot_mapping`, of a group of layers."""
        if group == 0:
            return self.slot_mapping
        assert self.group_slots is not None
        return self.group_slots[group - 1]

    def add_level(self, number: int, residual: torch.Tensor) -> None:
        """Add the features' rows of a level to the residual stream [T, E], in place, behind the layer of that number.

        Each row is added to one token's by itself.
        """
        assert self.level_rows is not None and self.level_features is not None
        residual[self.level_rows] += self.level_features[number]

    def table_of(self, group: int) -> torch.Tensor:
        """`block_table`, of a group of layers."""
        if group == 0:
            return self.block_table
        assert self.group_tables is not None
        return self.group_tables[group - 1]


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of a LoRA adapter.

    uid: never used again; a reload under the same name has another. digest: SHA-256 of its files: equal digests, equal
    weights. visual: it changes what works on images, so that their features differ too.
    """

    name: str
    uid: int
    digest: bytes
    visual: bool


# What a request runs with: each adapter's share counts so many times. Empty: the base model.
AdapterUse = tuple[tuple[AdapterRef, float], ...]
