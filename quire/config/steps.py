"""The KV block pool, and what one step may hold."""

from dataclasses import dataclass

from quire.config import convert
from quire.config.setting import Checked, Group, Kind, setting

_SWAP_GIB = 4
_STEPS = Group.STEPS


@dataclass(frozen=True)
class CacheConfig(Checked):
    """The KV block pool. Its size: `num_blocks`, else `memory_bytes`, else what `max_num_seqs` sequences of the
    model's full length need, within what `memory_fraction` allows.
    """

    block_size: int = setting(
        8,
        "Tokens in a KV block.",
        more="Small blocks waste little (half a block a sequence); 8 costs the kernels nothing.",
        group=_STEPS,
        at_least=1,
        vllm=True,
    )
    memory_bytes: int | None = setting(
        None,
        "The KV pool's size.",
        group=_STEPS,
        name="kv_cache_memory_bytes",
        kind=Kind.SIZE,
        at_least=1,
        vllm=True,
    )
    num_blocks: int | None = setting(
        None,
        "The KV pool's blocks, wherever it lies.",
        more="Where a model's layers form several groups, as windows make them, so many for each. "
        "At most so many states, where layers keep these instead of keys.",
        group=_STEPS,
        name="num_gpu_blocks_override",
        at_least=1,
        vllm=True,
    )
    memory_fraction: float | None = setting(
        None,
        "The share of a GPU's memory, or of free main memory, that may be taken.",
        more="On a GPU: of all its memory, by weights, pool, adapters and a step's intermediate results together; a "
        "step of full size is run to see what it takes. On a CPU: of the memory that is available once the weights "
        "are loaded, by the pool.",
        group=_STEPS,
        name="gpu_memory_utilization",
        above=0,
        at_most=1,
        shown="0.9; 0.5 of main memory",
        flags=("--device-memory-utilization",),
        vllm=True,
    )
    swap_bytes: int = setting(
        _SWAP_GIB * convert.GIB,
        "Main memory for preempted sequences of a GPU.",
        more="In GiB; 0 computes their blocks anew.",
        group=_STEPS,
        name="swap_space",
        kind=Kind.NUMBER,
        metavar="GIB",
        at_least=0,
        takes=float,
        convert=convert.gibibytes,
        shown=str(_SWAP_GIB),
        vllm=True,
    )
    enable_prefix_caching: bool = setting(
        True, "Reuse the KV blocks of equal beginnings (the default).", group=_STEPS, vllm=True
    )


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """What one step may hold."""

    max_num_seqs: int = setting(64, "Most sequences in a step.", group=_STEPS, at_least=1, vllm=True)
    max_num_batched_tokens: int = setting(
        512,
        "Most tokens in a step.",
        more="Over all its sequences.",
        group=_STEPS,
        kind=Kind.SIZE,
        at_least=1,
        vllm=True,
    )
