"""The tensors of the KV pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from quire import huge_pages
from quire.types import KVCache, KVSpec


def allocate_cache(
    spec: KVSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """The pool's tensors, one pair a layer. Memory is committed as blocks are first used."""

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if device.type == "cpu":
            return huge_pages.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    caches: dict[int, KVCache] = {}
    for group in spec.groups:
        shape = (num_blocks, group.num_kv_heads, block_size, group.head_dim)
        caches.update({layer: KVCache(tensor(shape), tensor(shape)) for layer in group.layers})
    return [caches[layer] for layer in range(spec.num_layers)]


def poison(caches: Sequence[KVCache], blocks: Sequence[int] | None = None) -> None:
    """Overwrite blocks with NaN, or all there are: what reads them must not go unseen."""
    for cache in caches:
        where = slice(None) if blocks is None else list(blocks)
        cache.keys[where] = cache.values[where] = torch.nan


def release(caches: Sequence[KVCache]) -> Callable[[], None]:
    """Give the pool's memory back; the function that is returned takes it again."""
    back = [huge_pages.release(tensor) for cache in caches for tensor in (cache.keys, cache.values)]

    def take_again() -> None:
        for take in back:
            take()

    return take_again
