"""What windows save, counted; the memory that groups of layers share; tables and slots of several groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.config import CacheConfig, SchedulerConfig
from quire.platform.execution import batch
from quire.platform.execution.kv_tensors import allocate_cache, poison, tensors_of
from quire.platform.execution.memory import block_bytes, count_blocks, full_step, useful_blocks
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.platform.execution.sequences import WorkerSequence
from quire.platform.execution.staging import Staging
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.group_tables import NO_BLOCK
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex, root_key
from quire.platform.kv.windows import Footprint, count_held, first_place
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.sampling_input import SamplingInput
from quire.platform.scheduling.plan import Chunk
from quire.types import KVSpec

SIZE = CacheConfig().block_size
CPU = torch.device("cpu")
# 26 layers, every sixth of which keeps all, as Gemma 3 with 1 B parameters has them.
GEMMA = KVSpec(26, 1, 256, tuple(0 if layer % 6 == 5 else 512 for layer in range(26)))


def windows_of(spec: KVSpec) -> tuple[int, ...]:
    return tuple(group.window for group in spec.groups)


@pytest.mark.parametrize("chunk", [64, 2048])
def test_a_model_shaped_as_gemma_3_holds_less_than_30_percent(chunk: int) -> None:
    windows, tokens = windows_of(GEMMA), 8192
    kv = KVManager(BlockPool(20_000, SIZE, PrefixIndex()), windows=windows)
    ids = [place % 1000 for place in range(tokens + 600)]
    kv.open(1, root_key())
    kv.admit(1, ids, [], 0, chunk)
    for start in range(chunk, tokens, chunk):
        kv.publish(1, ids, start - chunk, start)
        assert kv.reserve(1, start, chunk)
    whole = tokens // SIZE * block_bytes(KVSpec(26, 1, 256), SIZE, 2)
    for computed in range(tokens, tokens + 600):
        assert kv.reserve(1, computed, 1)
        held = len(kv.blocks(1)) * block_bytes(GEMMA, SIZE, 2)
        assert held < 0.30 * whole
    assert held == (1099 * 4 + 24 * (1099 - (8791 + 1 - 512) // SIZE)) * block_bytes(KVSpec(1, 1, 256), SIZE, 2)
    kv.check_integrity({1: tokens + 600}, {})


def test_what_a_token_reads() -> None:
    assert [first_place(6, tokens, 4) for tokens in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert first_place(0, 1000, 4) == 0
    assert count_held((0, 6), 13, 4) == 4 + 2 and count_held((0, 6), 0, 4) == 0


def test_the_memory_of_groups() -> None:
    spec = KVSpec(7, 2, 6, (4, 4, 0, 4, 4, 0, 4), value_dim=4)
    groups = spec.groups
    assert [(group.window, tuple(group.layers)) for group in groups] == [
        (0, (2, 5)),
        (4, (0, 1)),
        (4, (3, 4)),
        (4, (6,)),
    ]
    caches = allocate_cache(spec, 9, 4, torch.bfloat16, CPU)
    assert [cache.group for cache in caches] == [1, 1, 0, 2, 2, 0, 3]
    assert [list(cache.keys.shape) for cache in caches] == [[9, 2, 4, 6]] * 7
    assert [list(cache.values.shape) for cache in caches] == [[9, 2, 4, 4]] * 7
    assert len(tensors_of(caches)) == 4, "keys and values of the two layers that a group has"
    assert caches[2].keys is caches[0].keys and caches[2].keys is not caches[1].keys
    assert sum(tensor.nbytes for tensor in tensors_of(caches)) == 9 * block_bytes(spec, 4, 2)
    poison(caches, [3])
    assert all(bool(tensor[3].isnan().all()) for tensor in tensors_of(caches))


def test_blocks_whose_values_have_another_size_than_their_keys() -> None:
    """Copied, packed and put elsewhere."""
    caches = allocate_cache(KVSpec(2, 2, 6, value_dim=4), 9, 4, torch.float32, CPU)
    for tensor in tensors_of(caches):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors_of(caches)]
    pool = PoolBlocks(caches)
    assert pool.bytes_a_block == block_bytes(KVSpec(2, 2, 6, value_dim=4), 4, 4)
    packed = pool.gather([3, 1])
    assert list(packed.shape) == [2, pool.bytes_a_block]
    poison(caches, [3, 1])
    pool.scatter(packed, [1, 3])
    pool.copy([(1, 0)])
    for tensor, old in zip(tensors_of(caches), before, strict=True):
        assert torch.equal(tensor[[1, 3, 0]], old[[3, 1, 3]])


def test_a_pool_of_several_groups() -> None:
    windows, scheduler = windows_of(GEMMA), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048)
    useful = useful_blocks(GEMMA, 8, scheduler, 8192)
    assert useful == 4 * (1024 + 6 * 65) + 6 * (256 + 4)
    assert useful_blocks(KVSpec(26, 1, 256), 8, scheduler, 8192) == 4 * 1024
    assert count_blocks(CacheConfig(), 1000, useful, 10**9, 10**9) == useful
    assert count_blocks(CacheConfig(num_blocks=30), 1000, useful, 10**9, 0, len(windows)) == 7 * 30
    plan = full_step(scheduler, 8, 8192, groups=7)
    assert all(7 * chunk.length <= 8 * len(chunk.block_ids) for chunk in plan.chunks)


def test_tables_and_slots_of_several_groups() -> None:
    """The same from lists and by way of staged memory; of a window's group only what the chunk reads."""
    windows, params = (0, 6), SamplingInput(SamplingParams())
    sequences = [WorkerSequence(range(30), 20, params, (), (), None) for _ in range(2)]
    sequences[0].block_ids = [5, NO_BLOCK, 6, NO_BLOCK, 7, 8, 9, 10]
    sequences[1].block_ids = [1, 2, 3, 4]
    chunks = [Chunk(0, 13, 2, 30, (), 8, ()), Chunk(1, 0, 7, 30, (), 4, ())]
    built = batch.build_groups(chunks, sequences, 4, windows)
    context = built.context
    assert context.table_of(0).tolist() == [[5, 6, 7, 9], [1, 3, 0, 0]]
    assert context.table_of(1).tolist() == [[0, 0, 8, 10], [2, 4, 0, 0]]
    assert context.slots_of(0).tolist() == [9 * 4 + 1, 9 * 4 + 2, 4, 5, 6, 7, 12, 13, 14]
    assert context.slots_of(1).tolist() == [10 * 4 + 1, 10 * 4 + 2, 8, 9, 10, 11, 16, 17, 18]
    assert built.token_ids.tolist() == [13, 14, *range(7)] == context.positions.tolist()
    assert (context.context_len.tolist(), context.query_start.tolist()) == ([15, 7], [0, 2, 9])
    assert (context.position_limit, context.longest) == (2048, 20)
    sent = batch.send(chunks, sequences, 4, Staging(CPU), rows=3, width=6, windows=windows).context
    assert list(sent.group_tables.shape) == [1, 3, 6] and list(sent.group_slots.shape) == [1, 10]
    assert torch.equal(sent.table_of(1)[:2, :4], context.table_of(1)) and sent.slots_of(1).tolist()[-1] == -1
    assert torch.equal(sent.slots_of(0)[:9], context.slots_of(0))
    copy = batch.StepInputs(built.token_ids, context).clone().context
    assert torch.equal(copy.group_slots, context.group_slots) and copy.group_slots is not context.group_slots


def test_one_group_is_laid_out_as_ever() -> None:
    """By lists and by arrays, which is how a GPU's step is made: the same numbers, and no tensors of other groups."""
    sequence = WorkerSequence(range(30), 20, SamplingInput(SamplingParams()), (), (), None)
    sequence.block_ids = [5, 6, 7, 9]
    chunks = [Chunk(0, 3, 11, 30, (), 4, ())]
    built = batch.build(chunks, [sequence], 4)
    sent = batch.send(chunks, [sequence], 4, Staging(CPU))
    assert built.token_ids.tolist() == sent.token_ids.tolist()
    names = batch.tensors(built.context).keys()
    assert names == batch.tensors(sent.context).keys() and not {"group_slots", "group_tables"} & names
    for name, tensor in batch.tensors(built.context).items():
        assert torch.equal(tensor, getattr(sent.context, name)) and tensor.dtype is getattr(sent.context, name).dtype
    for one in (built, batch.build(chunks, [sequence], 4, mrope=True)):
        found = batch.StepInputs(one.token_ids, one.context).arrays()  # asked of the tensors
        assert [array.ctypes.data for array in one.arrays()] == [array.ctypes.data for array in found]
        assert [array.shape for array in one.arrays()] == [array.shape for array in found]
    uniform = batch.send(chunks, [sequence], 4, Staging(CPU), windows=(3,)).context
    assert uniform.block_table.tolist() == [[5, 6, 7, 9]] and np.prod(uniform.block_table.shape) == 4


def test_a_footprint_counts_a_chunk_and_its_window() -> None:
    """Every chunk of the size that is allowed, anywhere in a sequence, stays within the spans."""
    for windows in ((7,), (0, 9), (3, 30)):
        footprint = Footprint(60, 4, windows)
        kv = KVManager(BlockPool(60, 4), windows=windows)
        kv.open(1, root_key())
        length, start = min(150, footprint.longest(150)), footprint.most_at_once
        kv.admit(1, range(length), [], 0, start)
        for begin in range(start, length - start, start):
            assert kv.reserve(1, begin, start)
            assert len(kv.blocks(1)) <= footprint.blocks(begin + start)
        kv.close(1)
