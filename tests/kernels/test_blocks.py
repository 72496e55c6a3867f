"""Whole blocks of a GPU's cache of keys and values, moved from place to place."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernel_helpers import randn, same_bits

from quire.platform.execution.host_cache import HostCache
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.types import KVCache


def pool(caches: int, blocks: int, size: int, apart: int) -> list[torch.Tensor]:
    """Caches of bytes [blocks, size], each `apart` bytes off a multiple of 16."""
    found = []
    for i in range(caches):
        buffer = torch.zeros(blocks * size + 64, dtype=torch.uint8)
        start = -buffer.data_ptr() % 16 + apart
        cache = buffer[start : start + blocks * size].view(blocks, size)
        noise = torch.randint(0, 256, (blocks, size), generator=torch.Generator().manual_seed(i))
        found.append(cache.copy_(noise.to(torch.uint8)))
    return found


def addresses(caches: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64)


# Bytes of a block that can be moved 16, 4 and 2 at a time; more than one block of threads moves; addresses that cannot.
SIZES = [(64, 0), (20, 0), (6, 0), (16, 2), (16, 4), (80_000, 0), (80_004, 0), (33_000, 2)]


@pytest.mark.parametrize(("size", "apart"), SIZES)
@pytest.mark.parametrize("num_caches", [1, 4])
def test_blocks_are_copied(emulated_cuda: ModuleType, num_caches: int, size: int, apart: int) -> None:
    for pairs in ([], [(3, 0)], [(3, 0), (1, 5), (3, 4)]):
        caches = pool(num_caches, 6, size, apart)
        expected = [cache.clone() for cache in caches]
        for source, target in pairs:
            for cache in expected:
                cache[target] = cache[source]
        source, target = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous()
        emulated_cuda.copy_blocks(addresses(caches), 6, size, source, target)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))


@pytest.mark.parametrize(("size", "apart"), SIZES)
@pytest.mark.parametrize("num_caches", [1, 4])
def test_blocks_are_gathered_and_scattered(emulated_cuda: ModuleType, num_caches: int, size: int, apart: int) -> None:
    for ids in ([], [4], [5, 0, 2]):
        caches = pool(num_caches, 6, size, apart)
        before = [cache.clone() for cache in caches]
        packed = torch.zeros(len(ids), num_caches, size, dtype=torch.uint8)
        blocks = torch.tensor(ids, dtype=torch.int64)
        emulated_cuda.gather_blocks(addresses(caches), 6, size, blocks, packed)
        assert torch.equal(packed, torch.stack([cache[blocks] for cache in before], 1))
        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
        others = pool(num_caches, 6, size, 16 - apart)
        expected = [cache.clone() for cache in others]
        targets = blocks.flip(0)
        emulated_cuda.scatter_blocks(addresses(others), 6, size, targets, packed)
        for got, want, old in zip(others, expected, before, strict=True):
            want[targets] = old[blocks]
            assert torch.equal(got, want)


def test_a_block_outside_the_pool_is_passed_over(emulated_cuda: ModuleType) -> None:
    wrong = torch.tensor([-1, 6, 2, 2**62])
    right = torch.tensor([1, 3, 4, 5])
    caches = pool(2, 6, 48, 0)
    before = [cache.clone() for cache in caches]
    place = addresses(caches)
    packed = torch.full((4, 2, 48), 7, dtype=torch.uint8)
    emulated_cuda.gather_blocks(place, 6, 48, wrong, packed)
    assert packed[[0, 1, 3]].eq(7).all()
    assert torch.equal(packed[2], torch.stack([cache[2] for cache in before]))
    packed[2] = 9
    emulated_cuda.copy_blocks(place, 6, 48, wrong, right)
    for cache in before:
        cache[4] = cache[2]
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    emulated_cuda.copy_blocks(place, 6, 48, right, torch.tensor([-1, 6, -5, 2**62]))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    emulated_cuda.scatter_blocks(place, 6, 48, wrong, packed)
    for cache in before:
        cache[2] = 9
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_preempted_blocks_come_back(emulated_cuda: ModuleType, dtype: torch.dtype) -> None:
    """By way of main memory, and what comes back to other blocks than those that it left."""
    caches = [KVCache(randn(9, 2, 4, 6, dtype=dtype, seed=i), randn(9, 2, 4, 6, dtype=dtype, seed=-i)) for i in (1, 2)]
    tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
    before = [tensor.clone() for tensor in tensors]
    pool = PoolBlocks(caches)
    pool._kernels = emulated_cuda
    store = HostCache(pool)
    store.save([(0, 3), (7, 0), (2, 1), (4, 2)])
    for tensor in tensors:
        tensor.fill_(torch.nan)
    store.fetch([(3, 8), (0, 0), (1, 2), (2, 5)])
    for tensor, old in zip(tensors, before, strict=True):
        assert same_bits(tensor[[8, 0, 2, 5]], old[[0, 7, 2, 4]])
        assert int(tensor.isnan().sum()) == 5 * 2 * 4 * 6


def test_copies_one_after_the_other(emulated_cuda: ModuleType, dtype: torch.dtype) -> None:
    """A target may be the next copy's source, or be overwritten by a later one."""
    moves = [(0, 1), (2, 3), (1, 4), (5, 1), (6, 7), (7, 0), (8, 0)]
    caches = [KVCache(randn(9, 2, 4, 6, dtype=dtype, seed=i), randn(9, 2, 4, 6, dtype=dtype, seed=-i)) for i in (1, 2)]
    tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
    wanted = [tensor.clone() for tensor in tensors]
    for source, target in moves:
        for tensor in wanted:
            tensor[target] = tensor[source]
    for kernels in (None, emulated_cuda):
        copies = [KVCache(cache.keys.clone(), cache.values.clone()) for cache in caches]
        pool = PoolBlocks(copies)
        pool._kernels = kernels
        pool.copy(moves)
        got = [tensor for cache in copies for tensor in (cache.keys, cache.values)]
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
