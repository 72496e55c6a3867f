"""The frozen types that pass between rooms.

T: tokens in the step; S: sequences in the step; B: most blocks of any of them; R: rows whose logits are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model asks of the KV pool; the model says it, the engine allocates by it.

    head_dim is the size of one key and of one value; every layer has the same.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int


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
    """The batch's metadata for one step; `platform.batch` writes it, layers and kernels read it."""

    positions: torch.Tensor  # [T] int64: each token's position in its sequence
    query_start: torch.Tensor  # [S + 1] int32: sequence s owns tokens query_start[s] : query_start[s + 1]
    context_len: torch.Tensor  # [S] int32: tokens of s that are in the cache once this step has written its own
    prompt_len: torch.Tensor  # [S] int32: length of s's prompt (length-dependent rotary embeddings need it)
    slot_mapping: torch.Tensor  # [T] int64: the pool slot that takes each token's key and value
    block_table: torch.Tensor  # [S, B] int32: s's blocks in order; entries past its last block are not read
    position_limit: int  # every position is below it: a power of two, so that it seldom differs between steps
    longest: int  # of context_len and prompt_len, as a number: nobody needs to wait for a GPU to know
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


# Where an image lies in the language model's eyes: patches in time, height and width, after merging.
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What an image takes in a prompt; the model says it of the image's processed form.

    tokens: placeholders. grid: for models with `mrope` alone.
    """

    tokens: int
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """An image in a prompt: the tokens `offset` .. `offset + length` are its placeholders.

    digest: SHA-256 over its pixels, size and mode, and the processor's settings: equal digests, equal features.
    """

    digest: bytes
    offset: int
    length: int
    grid: Grid | None = None

    @property
    def end(self) -> int:
        return self.offset + self.length
