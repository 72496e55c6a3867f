"""The frozen types that pass between rooms.

T: tokens in the step; S: sequences in the step; B: most blocks of any of them; R: rows whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes: causal, over the keys and values that its sequence has in the KV pool.

    num_heads: of queries; num_kv_heads: of keys and of values, each of which serves num_heads / num_kv_heads of them.
    head_dim: size of one query or key. scale: of a query's product with a key, or one for each head of queries; None:
    1 / sqrt(head_dim). window: keys that a token sees, its own the last; 0: all before it. alibi_slopes: one for each
    head of queries (arXiv:2108.12409), or none. value_dim: size of one value; None: head_dim. softcap: scores become
    softcap * tanh(score / softcap), before slopes are added; 0: they stay. sinks: each head has one more score, a
    parameter of the model's, whose value is 0.

    Each field is an argument of `kernels.paged_attention`, and any may be combined. What no kernel computes has no
    field: the kernel's argument comes first.
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

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.window < 0:
            raise ValueError(f"window={self.window}: must be a number of keys, or 0 for all")
        if self.alibi_slopes and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"alibi_slopes has {len(self.alibi_slopes)} numbers for num_heads={self.num_heads}")
        if isinstance(self.scale, tuple) and len(self.scale) != self.num_heads:
            raise ValueError(f"scale has {len(self.scale)} numbers for num_heads={self.num_heads}")
        if self.value_dim is not None and self.value_dim < 1:
            raise ValueError(f"value_dim={self.value_dim}: must be the size of a value, or None for head_dim")
        if not 0.0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap={self.softcap}: must be a number above 0, or 0 for none")


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same of every token, in blocks of one shape: one block table serves them all.

    layers: their numbers, ascending. head_dim: size of one key and of one value.
    """

    layers: Sequence[int]
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model asks of the KV pool; the model says it, the engine allocates by it.

    head_dim is the size of one key and of one value; every layer has the same.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, layers: Iterable[AttentionSpec]) -> KVSpec:
        """What layers of these specs ask for. Raises ValueError where they do not form one group."""
        kept = [(spec.num_kv_heads, spec.head_dim) for spec in layers]
        if len(set(kept)) > 1:
            raise ValueError(f"its layers keep different things of a token, (key heads, size): {sorted(set(kept))}")
        return cls(len(kept), *kept[0]) if kept else cls(0, 0, 0)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The layers by what they keep of a token: one group, while all layers keep the same."""
        return (KVGroup(range(self.num_layers), self.num_kv_heads, self.head_dim),)


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's share of the block pool. The engine allocates it once; models hand it to the kernels.

    keys, values: [num_blocks, num_kv_heads, block_size, head_dim], the model's dtype. Slot s of the pool is
    token `s % block_size` of block `s // block_size`.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The batch's metadata for one step; `platform/execution/batch.py` writes it, layers and kernels read it."""

    positions: torch.Tensor  # [T] int64: each token's position in its sequence
    query_start: torch.Tensor  # [S + 1] int32: sequence s owns tokens query_start[s] : query_start[s + 1]
    context_len: torch.Tensor  # [S] int32: tokens of s that are in the cache once this step has written its own
    prompt_len: torch.Tensor  # [S] int32: length of s's prompt (length-dependent rotary embeddings need it)
    slot_mapping: torch.Tensor  # [T] int64: the pool slot that takes each token's key and value
    block_table: torch.Tensor  # [S, B] int32: s's blocks in order; entries past its last block are not read
    position_limit: int  # every position is below it: a power of two, so that it seldom differs between steps
    longest: int  # of context_len and prompt_len, as a number: nobody needs to wait for a GPU to know
    # [T] int32: each token sees its sequence's positions below this one, its own among them; None: up to its own.
    # Within a sequence it does not decrease.
    visible_end: torch.Tensor | None = None
    # For models with `mrope` alone: what each token turns by, [T] int64, or [3, T] where time, height and width differ.
    rotary_positions: torch.Tensor | None = None


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


# An image's patches in time, height and width, after merging.
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What an image takes in a prompt; the model says it of the image's processed form.

    tokens: placeholders. grid: for models with `mrope` alone. ids: the placeholders' token ids, of which the model's
    `image_token_id` is one at least; None: that one throughout. mask: which placeholders take a feature of the image's,
    in order; the others keep their own embeddings (the ends of rows, say). None: all take one.
    """

    tokens: int
    grid: Grid | None = None
    ids: tuple[int, ...] | None = None
    mask: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        for name, given in (("ids", self.ids), ("mask", self.mask)):
            if given is not None and len(given) != self.tokens:
                raise ValueError(f"an image's layout has {len(given)} {name} for {self.tokens} placeholders")

    @property
    def features(self) -> int:
        """How many features the image has."""
        return self.tokens if self.mask is None else sum(self.mask)


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """An image in a prompt: the tokens `offset` .. `offset + length` are its placeholders.

    digest: SHA-256 over its pixels, size and mode, and the processor's settings: equal digests, equal features.
    mask: as of `ImageLayout`.
    """

    digest: bytes
    offset: int
    length: int
    grid: Grid | None = None
    mask: tuple[bool, ...] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def features(self) -> int:
        """How many features the image has."""
        return self.length if self.mask is None else sum(self.mask)

    def features_between(self, begin: int, end: int) -> tuple[Sequence[int], int, int]:
        """(positions from `begin` to `end` of the prompt that take features, the first and the end of those features).

        begin, end: within the range.
        """
        if self.mask is None:
            return range(begin, end), begin - self.offset, end - self.offset
        places = [place for place in range(begin, end) if self.mask[place - self.offset]]
        first = sum(self.mask[: begin - self.offset])
        return places, first, first + len(places)
