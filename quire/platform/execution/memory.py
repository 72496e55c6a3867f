"""How many KV blocks fit: the device's free memory, the model's needs and the caller's wishes."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire import huge_pages
from quire.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.errors import QuireError
from quire.layers.stages import Stage
from quire.models.base import CausalLM
from quire.platform.execution.kv_tensors import allocate_cache
from quire.platform.execution.model_runner import ModelRunner
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.sampling_input import SamplingInput
from quire.platform.scheduling.plan import Chunk, NewSequence, StepPlan
from quire.types import KVSpec

_CPU_FRACTION = 0.5
_GPU_FRACTION = 0.9
# What attention may set aside where it splits long sequences of one token: kMostPartialBytes of csrc/cuda.
SPLIT_BYTES = 256 << 20
_LEAST_STATES = 2  # one that is read and one that is written


def block_bytes(spec: KVSpec, block_size: int, itemsize: int) -> int:
    """Bytes of one block over all layers of a group, keys and values."""
    return spec.layers_a_block * spec.bytes_a_token(itemsize) * block_size


def useful_blocks(spec: KVSpec, block_size: int, config: SchedulerConfig, max_model_len: int) -> int:
    """As many blocks as may be in use: those of `max_num_seqs` of the longest sequences, and a step's tokens in each
    group."""
    places = -(-max_model_len // block_size)
    new = config.max_num_batched_tokens // block_size
    each = sum(min(places, (group.window - 2) // block_size + 2) if group.window else places for group in spec.groups)
    return config.max_num_seqs * each + sum(new + config.max_num_seqs for group in spec.groups if group.window)


def state_bytes(spec: KVSpec, itemsize: int) -> int:
    """Bytes of one block over all layers with states: two states, with what comes with them."""
    state = spec.state
    if state is None:
        return 0
    floats = state.num_heads * state.head_dim * state.state_size
    return spec.num_states * 2 * (4 * floats + itemsize * (state.kernel - 1) * state.channels + 16)


def count_states(config: CacheConfig, spec: KVSpec, bytes_a_state: int, most_sequences: int, share: int) -> int:
    """How many states the pool has: half of its memory at most, or as many as its blocks where these are given.

    most_sequences: that run at a time; each reads a state and writes another, and as many again stay for prefixes.
    share: bytes that the pool takes at most. Raises QuireError where not even one sequence's fit.
    """
    if spec.state is None:
        return 0
    room = config.num_blocks if config.num_blocks is not None else (config.memory_bytes or share) // 2 // bytes_a_state
    states = min(4 * most_sequences, room)
    if states < _LEAST_STATES:
        raise QuireError(
            f"{states} states, each of which takes {bytes_a_state:,} bytes, fit what the KV pool may take, and a "
            f"sequence needs {_LEAST_STATES}: raise kv_cache_memory_bytes or gpu_memory_utilization."
        )
    return states


def host_share(config: CacheConfig, available: int) -> int:
    """Bytes that a pool in main memory takes at most, of `available`."""
    return int(available * (config.memory_fraction or _CPU_FRACTION))


def device_share(config: CacheConfig, total: int, available: int, others: int) -> int:
    """Bytes that a pool on a GPU takes at most.

    total: of the device; available: not taken yet, with the weights loaded; others: what adapters and the intermediate
    results of a step will take.
    """
    return int(total * (config.memory_fraction or _GPU_FRACTION)) - (total - available) - others


def count_swap_blocks(config: CacheConfig, bytes_a_block: int, device: torch.device) -> int:
    """How many blocks of preempted sequences main memory takes: half of what is available at most.

    None for a pool that is in main memory itself.
    """
    if device.type == "cpu":
        return 0
    return min(config.swap_bytes, huge_pages.available_bytes() // 2) // bytes_a_block


def count_blocks(
    config: CacheConfig, bytes_a_block: int, useful: int, available: int, share: int, groups: int = 1, taken: int = 0
) -> int:
    """The pool's size in blocks; QuireError when not even one fits, or more are asked for than memory holds.

    useful: blocks that can be in use. available: bytes of the device's memory that can be taken; share: as many of them
    as the pool takes at most, unless its size is given. groups: of layers; a number of blocks that is given is that of
    each. taken: bytes of the pool that something else than blocks of keys takes.
    """
    if config.num_blocks is not None:
        blocks = config.num_blocks * groups
    elif config.memory_bytes is not None:
        blocks = (config.memory_bytes - taken) // bytes_a_block
    else:
        blocks = min(useful, share // bytes_a_block)
    if blocks < 1:
        raise QuireError(
            f"not one block of {config.block_size} tokens, which takes {bytes_a_block:,} bytes, fits what the KV pool "
            "may take: raise kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size."
        )
    if blocks * bytes_a_block > available:
        states = f" beside {taken:,} bytes of states" if taken else ""
        raise QuireError(
            f"the KV pool of {blocks:,} blocks would take {blocks * bytes_a_block:,} bytes{states}, and "
            f"{max(available, 0):,} are available: lower kv_cache_memory_bytes or num_gpu_blocks_override."
        )
    return blocks


def step_bytes(model: CausalLM, config: EngineConfig, max_model_len: int, stage: Stage | None = None) -> int:
    """What the intermediate results of a step of full size take on a GPU: one is run, on a pool of its own, by all
    processes of the model together.

    An image's encoding is not among them: what `gpu_memory_utilization` leaves is for that.
    """
    weight = next(model.parameters())
    block_size, settings = config.cache.block_size, config.model
    spec = replace(model.kv_spec.within(max_model_len), own=model.own_layers)
    windows = spec.group_windows
    plan = full_step(config.scheduler, block_size, max_model_len, len(windows))
    blocks = max(len(chunk.block_ids) for chunk in plan.chunks)
    caches = allocate_cache(spec, blocks, block_size, model.dtype, weight.device)
    torch.cuda.synchronize(weight.device)
    torch.cuda.reset_peak_memory_stats(weight.device)
    before = torch.cuda.memory_allocated(weight.device)
    exact = settings.exact_products
    runner = ModelRunner(
        model, caches, weight.device, enforce_eager=True, exact_products=exact, windows=windows, stage=stage
    )
    runner.prepare(plan)
    runner.execute(plan).result()
    torch.cuda.synchronize(weight.device)
    peak = torch.cuda.max_memory_allocated(weight.device) - before
    del caches, runner
    torch.cuda.empty_cache()
    return peak


def full_step(config: SchedulerConfig, block_size: int, max_model_len: int, groups: int = 1) -> StepPlan:
    """A step of as many tokens and sequences as there may be, all of them drawing, from token 0. They share blocks."""
    sequences = min(config.max_num_seqs, config.max_num_batched_tokens)
    tokens = min(config.max_num_batched_tokens, sequences * max_model_len)
    sampling = SamplingInput(SamplingParams(temperature=1.0))
    chunks, new = [], []
    for index in range(sequences):
        count = tokens * (index + 1) // sequences - tokens * index // sequences
        blocks = tuple(range(-(-count // block_size) * groups))
        new.append(NewSequence(index, (0,) * count, count, sampling))
        chunks.append(Chunk(index, 0, count, count, (), 0, blocks, draws=(0,)))
    return StepPlan(tuple(chunks), new=tuple(new))
