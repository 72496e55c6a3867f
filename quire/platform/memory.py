"""How many KV blocks fit: the device's free memory, the model's needs and the caller's wishes."""

from __future__ import annotations

from pathlib import Path

import psutil

from quire.config import CacheConfig
from quire.contracts import KVSpec
from quire.errors import QuireError


def block_bytes(spec: KVSpec, block_size: int, itemsize: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_size * itemsize


def count_blocks(config: CacheConfig, bytes_a_block: int, max_num_seqs: int, max_model_len: int) -> int:
    """The pool's size in blocks; QuireError when not even one fits, or more are asked for than memory holds."""
    available = available_bytes()
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif config.memory_bytes is not None:
        blocks = config.memory_bytes // bytes_a_block
    else:
        useful = max_num_seqs * -(-max_model_len // config.block_size)
        blocks = min(useful, int(available * config.memory_fraction) // bytes_a_block)
    if blocks < 1:
        raise QuireError(
            f"not one block of {config.block_size} tokens, which takes {bytes_a_block:,} bytes, fits what the KV pool "
            "may take: raise kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size."
        )
    if blocks * bytes_a_block > available:
        raise QuireError(
            f"the KV pool of {blocks:,} blocks would take {blocks * bytes_a_block:,} bytes, and {available:,} are "
            "available: lower kv_cache_memory_bytes or num_gpu_blocks_override."
        )
    return blocks


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its container's where that is less."""
    available = psutil.virtual_memory().available
    limit, used = _read_number("memory.max"), _read_number("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _read_number(name: str) -> int | None:
    """A number of this process's own cgroup (v2); None where there is no such limit."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None
