"""The frozen types that pass between rooms.

T: tokens in the step; S: sequences in the step; B: most blocks of any of them; R: tokens whose hidden states somebody
wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.kv_types import STATE, AttentionSpec, KVGroup, KVSpec, StateSpec, int8_row_bytes
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
    "MOST_RECORDED",
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
    "int8_row_bytes",
]


# Steps of more tokens are never recorded on a CPU: tables that recordings know by their address need no more rows.
MOST_RECORDED = 1031


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
    # For models that narrow (`CausalLM.narrows`) alone: the step's tokens whose hidden states are returned, [R] int64;
    # None: all.
    wanted: torch.Tensor | None = None

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
