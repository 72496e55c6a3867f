"""The tensors of the KV pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire import huge_pages
from quire.types import KVCache, KVSpec, StateCache, int8_row_bytes


def allocate_cache(
    spec: KVSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, num_states: int = 0
) -> list[KVCache | StateCache]:
    """The pool's tensors: a pair for each layer of a group, which serves a layer of every group; or one, where values
    are a part of the keys. Memory is committed as blocks are first used.

    dtype: the model's, in which keys and values are, too, unless the spec says int8.
    num_states: blocks of the layers with states. They have the first numbers, so there is room for them in the tensors
    of keys and values too, which nobody touches.
    Returns the caches of the layers, in their order, and then those of the layers with states.
    """

    def tensor(shape: tuple[int, ...], kind: torch.dtype = dtype) -> torch.Tensor:
        if device.type == "cpu":
            return huge_pages.allocate(math.prod(shape) * kind.itemsize).view(kind).view(shape)
        return torch.empty(shape, dtype=kind, device=device)

    shape = (num_states + num_blocks, spec.num_kv_heads, block_size)
    value_dim = spec.value_dim or spec.head_dim

    def make() -> Callable[[int], KVCache]:
        """The tensors of a layer, as a cache of a group."""
        if spec.int8:
            rows = tensor((*shape, int8_row_bytes(spec.head_dim)), torch.int8)
            value_rows = rows if spec.latent else tensor((*shape, int8_row_bytes(value_dim)), torch.int8)
            return partial(KVCache.of_rows, rows, value_rows, spec.head_dim, value_dim)
        keys = tensor((*shape, spec.head_dim))
        return partial(KVCache, keys, keys[..., :value_dim] if spec.latent else tensor((*shape, value_dim)))

    groups = spec.groups
    layers = [make() for _ in range(spec.layers_a_block)]
    caches: dict[int, KVCache] = {}
    for number, group in enumerate(groups):
        caches.update({layer: layers[0](number) for layer in group.layers})  # another process's: nobody touches it
        kept = filter(spec.keeps, group.layers)
        caches.update({layer: cache(number) for layer, cache in zip(kept, layers, strict=False)})
    states = []
    if spec.state is not None:
        shape_of_states, shape_of_tails, ends = spec.state.shapes(num_states)
        for _ in range(spec.num_states):
            own = tensor(shape_of_states, torch.float32), tensor(shape_of_tails)
            states.append(
                StateCache(*own, tensor(ends, torch.int64), tensor(ends, torch.int64), block_size, len(groups))
            )
    return [*(caches[layer] for layer in range(spec.num_layers)), *states]


def tensors_of(caches: Sequence[KVCache | StateCache]) -> list[torch.Tensor]:
    """Keys and values, states and what comes with them."""
    return keys_of(caches) + states_of(caches)


def keys_of(caches: Sequence[KVCache | StateCache]) -> list[torch.Tensor]:
    """Keys and values, the first keys first: each tensor once, though several layers may have it, and values may be a
    part of the keys."""
    found: dict[int, torch.Tensor] = {}
    for cache in caches:
        if isinstance(cache, KVCache):
            for tensor in cache.whole:
                found.setdefault(tensor.data_ptr(), tensor)
    return list(found.values())


def states_of(caches: Sequence[KVCache | StateCache]) -> list[torch.Tensor]:
    """The tensors of the layers with states, whose blocks have the first numbers of the pool."""
    return [tensor for cache in caches if isinstance(cache, StateCache) for tensor in cache.tensors]


def poison(caches: Sequence[KVCache | StateCache], blocks: Sequence[int] | None = None) -> None:
    """Overwrite blocks with NaN, or all there are: what reads them must not go unseen. No state is where one was.

    Bytes of ones are NaN, too, where they are a scale of int8."""
    states = states_of(caches)
    count = len(states[0]) if states else 0
    own = {id(tensor) for tensor in states}
    for tensor in tensors_of(caches):
        where: slice | list[int] = slice(None)
        if blocks is not None:
            where = [block for block in blocks if (block < count) == (id(tensor) in own)]
        tensor[where] = torch.nan if tensor.is_floating_point() else -1


def release(caches: Sequence[KVCache | StateCache]) -> Callable[[], None]:
    """Give the pool's memory back; the function that is returned takes it again."""
    back = [huge_pages.release(tensor) for tensor in tensors_of(caches)]

    def take_again() -> None:
        for take in back:
            take()

    return take_again
