"""How many KV blocks fit: the device's free memory, the model's needs and the caller's wishes."""

from __future__ import annotations

from quire.config import CacheConfig
from quire.contracts import KVSpec
from quire.errors import QuireError
from quire.pages import available_bytes


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
