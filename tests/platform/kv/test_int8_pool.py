"""The pool of keys and values in int8: what a token takes, and whatever moves blocks moves scales too."""

from __future__ import annotations

import pytest
import torch

from quire.platform.execution.host_cache import HostCache
from quire.platform.execution.kv_tensors import allocate_cache, keys_of, poison, release, tensors_of
from quire.platform.execution.memory import block_bytes
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.types import AttentionSpec, KVCache, KVSpec, StateSpec

CPU = torch.device("cpu")
SPECS = {
    "heads": KVSpec(3, 2, 64, int8=True),
    "odd sizes": KVSpec(2, 3, 7, value_dim=10, int8=True),
    "groups": KVSpec(5, 2, 16, windows=(0, 8, 8, 8, 8), int8=True),
    "latents": KVSpec(3, 1, 18, value_dim=10, latent=True, int8=True),
}


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> KVSpec:
    return SPECS[request.param]


@pytest.fixture
def caches(spec: KVSpec) -> list[KVCache]:
    made = allocate_cache(spec, 9, 4, torch.bfloat16, CPU)
    for tensor in tensors_of(made):
        tensor.copy_(torch.randint(-100, 100, tensor.shape))
    return [cache for cache in made if isinstance(cache, KVCache)]


def test_a_row_takes_a_byte_a_number_and_four() -> None:
    assert KVSpec(3, 2, 64, int8=True).bytes_a_token(2) == 2 * 2 * 68
    assert KVSpec(3, 2, 64).bytes_a_token(2) / KVSpec(3, 2, 64, int8=True).bytes_a_token(2) > 1.88
    assert KVSpec(1, 8, 128).bytes_a_token(2) / KVSpec(1, 8, 128, int8=True).bytes_a_token(2) > 1.93
    assert SPECS["odd sizes"].bytes_a_token(4) == 3 * (8 + 4 + 12 + 4), "rows begin where a float may"
    assert SPECS["latents"].bytes_a_token(2) == 20 + 4
    latents = KVSpec.of([AttentionSpec(16, 1, 576, value_dim=512, latent=True)] * 3)
    assert not latents.int8, "no model asks for it"


def test_the_tensors_are_what_is_counted(spec: KVSpec, caches: list[KVCache]) -> None:
    assert sum(tensor.nbytes for tensor in tensors_of(caches)) == 9 * block_bytes(spec, 4, 2)
    assert len({tensor.data_ptr() for tensor in keys_of(caches)}) == len(keys_of(caches))
    shape = 9, spec.num_kv_heads, 4
    for cache in caches:
        assert cache.keys.shape == (*shape, spec.head_dim) and cache.values.shape == (
            *shape,
            spec.value_dim or spec.head_dim,
        )
        for scales in (cache.key_scales, cache.value_scales):
            assert scales is not None and scales.shape == (*shape, 1) and scales.dtype is torch.float32
        assert (cache.keys.data_ptr() == cache.values.data_ptr()) is spec.latent


def test_blocks_are_moved_with_their_scales(spec: KVSpec, caches: list[KVCache]) -> None:
    before = [tensor.clone() for tensor in tensors_of(caches)]
    pool = PoolBlocks(caches)
    assert pool.bytes_a_block == block_bytes(spec, 4, 2)
    pool.copy([(1, 0), (0, 2)])
    for tensor, old in zip(tensors_of(caches), before, strict=True):
        assert torch.equal(tensor[[0, 1, 2, 3]], old[[1, 1, 1, 3]])
    host = HostCache(pool)
    host.save([(3, 1), (4, 0)])
    poison(caches, [3, 4])
    for cache in caches:
        for scales in (cache.key_scales, cache.value_scales):
            assert scales is not None and bool(scales[[3, 4]].isnan().all())
    host.fetch([(1, 5), (0, 3)])
    for tensor, old in zip(tensors_of(caches), before, strict=True):
        assert torch.equal(tensor[[5, 3]], old[[3, 4]]) and torch.equal(tensor[6:], old[6:])


def test_memory_is_given_back(caches: list[KVCache]) -> None:
    take_again = release(caches)
    take_again()
    assert all(not bool(tensor.any()) for tensor in tensors_of(caches))


def test_states_stay_as_they_are() -> None:
    state = StateSpec(num_heads=2, head_dim=4, state_size=3, channels=8, kernel=4)
    plain, int8 = (
        allocate_cache(KVSpec(1, 2, 8, num_states=2, state=state, int8=kept), 9, 4, torch.bfloat16, CPU, 3)[1:]
        for kept in (False, True)
    )
    for one, other in zip(plain, int8, strict=True):
        assert not isinstance(one, KVCache) and not isinstance(other, KVCache)
        assert [(x.shape, x.dtype) for x in one.tensors] == [(x.shape, x.dtype) for x in other.tensors]
