"""The KV block pool, and what one step may hold."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config import convert
from quire.config.kv_transfer import kv_transfer
from quire.config.setting import Checked, Group, Kind, setting
from quire.config.speculative import speculative
from quire.errors import QuireError

_SWAP_GIB = 4
_STEPS = Group.STEPS


def _check_kv_dtype(value: object) -> None:
    if isinstance(value, str) and value.startswith("fp8"):
        raise QuireError(
            f"kv_cache_dtype={value!r}: keys and values are not kept in fp8, whose three or two bits behind the point "
            "are fewer than the seven of int8; take kv_cache_dtype='int8', which needs about as much memory, or 'auto'."
        )
    if isinstance(value, str) and value in ("bfloat16", "float16", "float32"):
        raise QuireError(
            f"kv_cache_dtype={value!r}: floats are kept in the model's dtype alone; take kv_cache_dtype='auto', and "
            "dtype for the model's."
        )
    if value not in ("auto", "int8"):
        raise QuireError(f"kv_cache_dtype={value!r}: is auto or int8.")


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
    kv_cache_dtype: str = setting(
        "auto",
        "How keys and values are kept: auto, in the model's dtype; int8, in about half of the bytes, on CPUs.",
        more="int8: each token's row of each head by itself, as whole numbers and a float32 scale "
        "(docs/performance.md has what that costs); states of layers that have these stay as they are.",
        group=_STEPS,
        check=_check_kv_dtype,
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
    kv_transfer_config: Mapping[str, object] | None = setting(
        None,
        'Keep KV blocks beside the pool, on disk: {"kv_connector": "DiskConnector", "kv_connector_extra_config": '
        '{"path": ..., "max_bytes": ...}}.',
        more="They are found again after a restart; the answers are the same, bit for bit. See docs/kv-on-disk.md.",
        group=_STEPS,
        kind=Kind.OBJECT,
        check=kv_transfer,
        vllm=True,
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
    speculative_config: Mapping[str, object] | None = setting(
        None,
        'Draft tokens, several of which a step may check: {"method": "ngram"}, or {"model": ...}, a draft model.',
        more="They change how long an answer takes, and no bit of it: docs/speculative-decoding.md.",
        group=_STEPS,
        kind=Kind.OBJECT,
        check=speculative,
        flags=("-sc",),
        vllm=True,
    )
