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
    """The pool's tensors: a pair for each layer of a group, which serves a layer of every group; or one, where values
    are a part of the keys. Memory is committed as blocks are first used.

    Returns the caches of the layers, in their order.
    """

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if device.type == "cpu":
            return huge_pages.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    shape = (num_blocks, spec.num_kv_heads, block_size)
    value_dim = spec.value_dim or spec.head_dim

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        keys = tensor((*shape, spec.head_dim))
        return keys, keys[..., :value_dim] if spec.latent else tensor((*shape, value_dim))

    groups = spec.groups
    pairs = [make() for _ in range(max(len(group.layers) for group in groups))]
    caches: dict[int, KVCache] = {}
    for number, group in enumerate(groups):
        caches.update({layer: KVCache(*pair, number) for layer, pair in zip(group.layers, pairs, strict=False)})
    return [caches[layer] for layer in range(spec.num_layers)]


def tensors_of(caches: Sequence[KVCache]) -> list[torch.Tensor]:
    """Keys and values, each tensor once, though several layers may have it, and values may be a part of the keys."""
    found: dict[int, torch.Tensor] = {}
    for cache in caches:
        found.setdefault(cache.keys.data_ptr(), cache.keys)
        found.setdefault(cache.values.data_ptr(), cache.values)
    return list(found.values())


def poison(caches: Sequence[KVCache], blocks: Sequence[int] | None = None) -> None:
    """Overwrite blocks with NaN, or all there are: what reads them must not go unseen."""
    where = slice(None) if blocks is None else list(blocks)
    for tensor in tensors_of(caches):
        tensor[where] = torch.nan


def release(caches: Sequence[KVCache]) -> Callable[[], None]:
    """Give the pool's memory back; the function that is returned takes it again."""
    back = [huge_pages.release(tensor) for tensor in tensors_of(caches)]

    def take_again() -> None:
        for take in back:
            take()

    return take_again
