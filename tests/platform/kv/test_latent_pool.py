"""The pool of a model with latents: one row a token and layer, and whatever moves blocks moves that alone."""

from __future__ import annotations

import pytest
import torch

from quire.config import CacheConfig, SchedulerConfig
from quire.platform.execution.host_cache import HostCache
from quire.platform.execution.kv_tensors import allocate_cache, poison, release, tensors_of
from quire.platform.execution.memory import block_bytes, count_blocks, useful_blocks
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.types import AttentionSpec, KVCache, KVSpec

CPU = torch.device("cpu")
# A latent of 10 numbers, and a part of the keys with 6.
SPEC = KVSpec.of([AttentionSpec(4, 1, 16, value_dim=10, latent=True)] * 3)


@pytest.fixture
def caches() -> list[KVCache]:
    made = allocate_cache(SPEC, 9, 4, torch.float32, CPU)
    for tensor in tensors_of(made):
        tensor.copy_(torch.randn(tensor.shape))
    return made


def test_a_token_takes_a_row_in_each_layer(caches: list[KVCache]) -> None:
    assert block_bytes(SPEC, 1, 2) == 3 * (10 + 6) * 2
    tensors = tensors_of(caches)
    assert [list(tensor.shape) for tensor in tensors] == [[9, 1, 4, 16]] * 3
    assert sum(tensor.nbytes for tensor in tensors) == 9 * block_bytes(SPEC, 4, 4)
    for cache in caches:
        assert torch.equal(cache.values, cache.keys[..., :10])
        assert cache.values.untyped_storage().data_ptr() == cache.keys.untyped_storage().data_ptr()


def test_a_pool_has_as_many_more_blocks() -> None:
    """DeepSeek-V2-Lite's 16 heads would take 16 (192 + 128) numbers a token and layer."""
    latents = KVSpec.of([AttentionSpec(16, 1, 576, value_dim=512, latent=True)] * 27)
    heads = KVSpec.of([AttentionSpec(16, 16, 192, value_dim=128)] * 27)
    scheduler = SchedulerConfig(max_num_seqs=1000)
    counts = []
    for spec in (latents, heads):
        useful = useful_blocks(spec, 8, scheduler, 100_000)
        counts.append(count_blocks(CacheConfig(), block_bytes(spec, 8, 2), useful, 10**10, 10**9))
    assert counts == [10**9 // (27 * 576 * 8 * 2), 10**9 // (27 * 5120 * 8 * 2)]


def test_blocks_are_moved_whole(caches: list[KVCache]) -> None:
    before = [tensor.clone() for tensor in tensors_of(caches)]
    pool = PoolBlocks(caches)
    assert pool.bytes_a_block == block_bytes(SPEC, 4, 4)
    pool.copy([(1, 0), (0, 2)])
    for tensor, old in zip(tensors_of(caches), before, strict=True):
        assert torch.equal(tensor[[0, 1, 2, 3]], old[[1, 1, 1, 3]])
    host = HostCache(pool)
    host.save([(3, 1), (4, 0)])
    poison(caches, [3, 4])
    assert all(bool(tensor[[3, 4]].isnan().all()) for tensor in tensors_of(caches))
    host.fetch([(1, 5), (0, 3)])
    for tensor, old in zip(tensors_of(caches), before, strict=True):
        assert torch.equal(tensor[[5, 3]], old[[3, 4]]) and torch.equal(tensor[6:], old[6:])


def test_memory_is_given_back_once(caches: list[KVCache]) -> None:
    take_again = release(caches)
    take_again()
    assert all(not bool(tensor.any()) for tensor in tensors_of(caches))
