"""The table of kernels. Each row is a public function: its signature, what it computes, what it expects of its tensors.

Everything else follows from the row: the checks and the call of the compiled kernel on the CPU (`native.py`) and on a
GPU (`cuda.py`), and the checks alone for a rehearsal (`rehearsal.py`). `reference.py` has the same function in plain
torch. docs/adding-a-kernel.md shows how a row comes to be. `row_ops.py` is what goes row by row, `quantized_ops.py`
what has quantized weights.

Shapes: T tokens, K in-features, C channels, H query heads, G key/value heads, D head size, S sequences, B blocks of
each, N rows of a weight. Dtypes: float32, bfloat16 or float16, the same for activations, weights and cache; sums are
kept in float32. No result depends on how many tokens or sequences share the call. Raised for arguments that do not fit:
TypeError (dtype, layout) and ValueError (shape, strides, device), which name the argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.kernels.backends import backend_of
from quire.kernels.packed import GROUP, is_form
from quire.kernels.table import Columns, Contiguous, Heads, Let, Rows, Rule, kernel

if TYPE_CHECKING:
    from quire.kernels.adapters import LoraSegments, LoraTable
    from quire.kernels.binding import Place

# Of a vocabulary: more could add up to more than the sampler's integers hold.
_MOST_TOKENS = 2**20
_DRAW_BYTES = 32


def result_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """What a product is written in. Raises TypeError for what is neither x's dtype nor float32."""
    if out_dtype is None:
        return dtype
    if out_dtype is not dtype and out_dtype is not torch.float32:
        raise TypeError(f"out_dtype: expected {dtype} or torch.float32, got {out_dtype}")
    return out_dtype


def _weight_list(
    place: Place,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    features: int,
    dtype: torch.dtype,
) -> tuple[tuple[int, ...], int]:
    """(data, bias or 0, rows; below 0, if packed) for each weight, flat; and the sum of their rows."""
    if len(weights) != len(biases):
        raise ValueError(f"biases: expected one or None for each of {len(weights)} weights, got {len(biases)}")
    here, total = place.here, 0
    flat: list[int] = []
    for weight, bias in zip(weights, biases):  # noqa: B905 (the lengths were compared above)
        shape = weight.shape
        fits = weight.dtype is dtype and here(weight) and weight.is_contiguous()
        if fits and len(shape) == 2 and shape[1] == features:
            count = rows = shape[0]
        elif fits and place.takes_packed and is_form(shape, features):
            rows = shape[0] * GROUP
            count = -rows
        else:
            place.reject("weights", weight, f"[N, {features}], contiguous, or on a CPU such a one packed", dtype)
        total += rows
        if bias is None:
            flat += weight.data_ptr(), 0, count
            continue
        if bias.dtype is not dtype or bias.shape != (rows,) or not here(bias) or not bias.is_contiguous():
            place.reject("biases", bias, f"[{rows}], contiguous", dtype)
        flat += weight.data_ptr(), bias.data_ptr(), count
    return tuple(flat), total


@kernel(
    tensors={"x": Rows("T K")},
    lets=(
        Let("out_dtype", result_dtype, "out_dtype, dtype"),
        Let("flat, N", _weight_list, "place, weights, biases, K, dtype"),
    ),
    out="T N",
    out_dtype="out_dtype",
    passes="x_at, T, K, x_stride, flat, y_at, code, _CODES[out_dtype]",
)
def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    """Return x times each weight transposed, plus its bias, side by side, plus what adapters add.

    x: [T, K], rows may be strided. weights: each [N_i, K], contiguous, or packed (`packed.py`) on a CPU. biases: each
    [N_i] or None.
    segments: which rows belong to which adapters; tables: the adapters of each weight, or None where none changes its
    product. Of a segment's rows, a weight's product y becomes (y + scaling * weight * (x a^T) B^T) * scale + shift
    (arXiv:2106.09685), each adapter at its own rank, sums in float32; other rows stay as they are.
    Returns [T, sum N_i] in `out_dtype` (float32 or, by default, x's dtype). Raises IndexError for rows or slots that
    do not exist, ValueError for segments of another number of rows than T.
    """
    return backend_of(x).linear(x, weights, biases, out_dtype, tables, segments)


def _stored_dtype(
    dtype: torch.dtype,
    values: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> torch.dtype:
    if (value_scales is None) is not (key_scales is None or values is None):
        raise ValueError("value_scales: expected scales of all that is stored, or of none")
    return dtype if key_scales is None else torch.int8


# A cache's rows have the kernel's own dtype, or are int8, each with its scale behind it.
_STORED = Let("stored", _stored_dtype, "dtype, values, key_scales, value_scales")
_KEYS_APART = Rule(
    "keys_stride == (D if key_scales is None else 4 * key_scales_stride) or blocks * G * size == 1",
    "keys",
    "rows as far apart as key_scales, or contiguous ones",
)


def _check_options(window: int, softcap: float, chunk: int, biases: torch.Tensor | None) -> None:
    for name, keys in (("window", window), ("chunk", chunk)):
        if not 0 <= keys < 1 << 62:
            raise ValueError(f"{name}: expected a number of keys, or 0 for all, got {keys}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a number above 0, or 0 for none, got {softcap}")
    if biases is not None and biases.dim() == 2 and not biases.shape[-1] % 2:
        raise ValueError(f"biases: expected an odd number of distances, got {biases.shape[-1]}")


@kernel(
    # The cache says what the head sizes are, the query what the dtype is.
    tensors={
        "keys": Columns("blocks G size D", "stored"),
        "values": Columns("blocks G size DV", "stored"),
        "key_scales": Columns("blocks G size 1", "float32"),
        "value_scales": Columns("blocks G size 1", "float32"),
        "query": Heads("T H D"),
        "block_table": Rows("S B", "int32"),
        "query_start": Contiguous("S+1", "int32"),
        "context_len": Contiguous("S", "int32"),
        "slopes": Contiguous("H", "float32"),
        "sinks": Contiguous("H", "float32"),
        "head_scales": Contiguous("H", "float32"),
        "visible_end": Contiguous("T", "int32"),
        "biases": Contiguous("H distances", "float32"),
    },
    dtype_of="query",
    rules=(
        Rule("G and H % G == 0", "query", "a multiple of {G} heads"),
        _KEYS_APART,
        Rule(
            "key_scales is None or values_stride == 4 * value_scales_stride or blocks * G * size == 1",
            "values",
            "rows as far apart as value_scales",
        ),
    ),
    lets=(
        _STORED,
        Let("", _check_options, "window, softcap, chunk, biases"),
    ),
    out="T H DV",
    passes="query_at, query_stride, T, H, D, keys_at, values_at, blocks, G, size, block_table_at, block_table_stride, "
    "B, query_start_at, context_len_at, S, scale, y_at, code, window, slopes_at, DV, values_stride, softcap, sinks_at, "
    "head_scales_at, visible_end_at, chunk, key_scales_at, value_scales_at, keys_stride, biases_at, distances // 2",
)
def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    head_scales: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
    chunk: int = 0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of every token over its sequence's cached keys and values: causal, but for `visible_end`.

    query: [T, H, D], tokens may be strided; keys: [num_blocks, G, block_size, D], H a multiple of G; values:
    [num_blocks, G, block_size, DV], which may be the first columns of wider rows (as `x[..., :DV]` is);
    block_table: [S, B] int32; query_start: [S + 1] int32; context_len: [S] int32 (includes this step's
    tokens, already stored). Sequence s's tokens are its last `query_start[s+1] - query_start[s]`.

    A token at position p sees the keys from p + 1 - window on (window 0: from the first), and from p - p % chunk on
    (chunk 0: from the first), up to its own or, with visible_end [T] int32, up to visible_end[t] - 1: at least its own,
    at most the context's last, and within a sequence no token's end lies before the one's before it. Slots past a
    sequence's context are never read, nor are blocks that lie wholly before what any of its tokens sees: their entries
    in the table may be anything.

    The score of a key is query * key * scale * head_scales[h] ([H] float32; None: 1); then, with softcap, softcap *
    tanh(score / softcap); then, with slopes [H] float32, slopes[h] * (key's position - token's) is added: ALiBi
    (arXiv:2108.12409); then, with biases [H, 2 R + 1] float32, biases[h, R + (key's position - token's)], of which what
    is less than -R counts as -R and what is more than R as R. sinks: [H] float32, one more score of each head, whose
    value is 0.

    key_scales, value_scales: [num_blocks, G, block_size, 1] float32: keys and values are int8, the first columns of
    their rows, and are multiplied by these, each of which lies in its row behind them (`types.KVCache.of_rows`).
    Raises ValueError for numbers that make no sense. Returns [T, H, DV], contiguous.
    """
    return backend_of(query).paged_attention(
        query, keys, values, block_table, query_start, context_len, scale, window, slopes, softcap, sinks, head_scales,
        visible_end, chunk, key_scales, value_scales, biases,
    )  # fmt: skip


def _check_values(value: torch.Tensor | None, values: torch.Tensor | None) -> None:
    if (value is None) is not (values is None):
        one, other = ("value", "values") if value is None else ("values", "value")
        raise ValueError(f"{one}: expected a tensor, as {other} is one, got None")


@kernel(
    tensors={
        "keys": Columns("blocks G size D", "stored"),
        "values": Columns("blocks G size DV", "stored"),
        "key_scales": Columns("blocks G size 1", "float32"),
        "value_scales": Columns("blocks G size 1", "float32"),
        "slot_mapping": Contiguous("T", "int64"),
        "key": Heads("T key_heads D"),
        "value": Heads("T value_heads DV"),
    },
    dtype_of="key",
    rules=(
        Rule("key_heads == G", "key", "{G} heads"),
        Rule("value is None or value_heads == G", "value", "{G} heads"),
        _KEYS_APART,
        Rule(
            "values_stride == (DV if value_scales is None else 4 * value_scales_stride) or blocks * G * size == 1",
            "values",
            "rows as far apart as value_scales, or contiguous ones",
        ),
    ),
    lets=(_STORED, Let("", _check_values, "value, values")),
    passes="key_at, key_stride, value_at, value_stride, keys_at, values_at, slot_mapping_at, T, G, D, size, blocks, "
    "dtype.itemsize, DV, key_scales_at, value_scales_at, keys_stride, values_stride, code",
)
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Store key [T, G, D] and value [T, G, DV] (tokens may be strided) into pool slots `slot_mapping` [T] int64.

    keys: [num_blocks, G, block_size, D]; values: [num_blocks, G, block_size, DV]. Where value and values are None, keys
    are all that is stored. Raises IndexError for a slot outside them.

    key_scales, value_scales: [num_blocks, G, block_size, 1] float32, as of `paged_attention`: what is stored are whole
    numbers, each row's divided by its scale, the greatest of their absolute values / 127, to nearest even. A row with a
    number that is not finite gets the scale NaN.
    """
    backend_of(keys).write_kv(key, value, keys, values, slot_mapping, key_scales, value_scales)


# -- What only a GPU has a kernel for ---------------------------------------------------------------------------------


def _check_blocks(num_blocks: int, block_bytes: int) -> None:
    if block_bytes <= 0 or block_bytes % 2:
        raise ValueError(f"block_bytes: expected a multiple of 2 above 0, got {block_bytes}")
    if num_blocks < 0:
        raise ValueError(f"num_blocks: expected 0 or more, got {num_blocks}")


_BLOCKS = Let("", _check_blocks, "num_blocks, block_bytes")


@kernel(
    gpu_only=True,
    tensors={
        "caches": Contiguous("N", "int64"), "sources": Contiguous("count", "int64"),
        "targets": Contiguous("count", "int64"),
    },
    lets=(_BLOCKS,),
    passes="caches_at, N, num_blocks, block_bytes, sources_at, targets_at, count",
)  # fmt: skip
def copy_blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """In every cache, block sources[i] becomes block targets[i]; no block is in both.

    caches: [N] int64, the addresses of tensors of num_blocks times block_bytes. sources, targets: [count] int64.
    """
    backend_of(caches).copy_blocks(caches, num_blocks, block_bytes, sources, targets)


@kernel(
    gpu_only=True,
    tensors={
        "caches": Contiguous("N", "int64"), "sources": Contiguous("count", "int64"),
        "packed": Contiguous("count N block_bytes", "uint8"),
    },
    lets=(_BLOCKS,),
    passes="caches_at, N, num_blocks, block_bytes, sources_at, count, packed_at",
)  # fmt: skip
def gather_blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, sources: torch.Tensor, packed: torch.Tensor
) -> None:
    """Block sources[i] of every cache to packed[i]: [count, N, block_bytes] uint8. See `copy_blocks`."""
    backend_of(caches).gather_blocks(caches, num_blocks, block_bytes, sources, packed)


@kernel(
    gpu_only=True,
    tensors={
        "caches": Contiguous("N", "int64"), "targets": Contiguous("count", "int64"),
        "packed": Contiguous("count N block_bytes", "uint8"),
    },
    lets=(_BLOCKS,),
    passes="caches_at, N, num_blocks, block_bytes, targets_at, count, packed_at",
)  # fmt: skip
def scatter_blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, targets: torch.Tensor, packed: torch.Tensor
) -> None:
    """packed[i], [count, N, block_bytes] uint8, to block targets[i] of every cache. See `copy_blocks`."""
    backend_of(caches).scatter_blocks(caches, num_blocks, block_bytes, targets, packed)


def _check_vocabulary(vocabulary: int) -> None:
    if not 0 < vocabulary <= _MOST_TOKENS:
        raise ValueError(f"logits: expected 1 to {_MOST_TOKENS} columns, got {vocabulary}")


def _count_draws(num_bytes: int) -> int:
    count, rest = divmod(num_bytes, _DRAW_BYTES)
    if rest:
        raise ValueError(f"draws: expected a multiple of {_DRAW_BYTES} bytes, got {num_bytes}")
    return count


@kernel(
    gpu_only=True,
    tensors={"logits": Rows("R V", "float32"), "draws": Contiguous("num_bytes", "uint8")},
    lets=(Let("", _check_vocabulary, "V"), Let("count", _count_draws, "num_bytes")),
    out="count",
    out_dtype="_INT64",
    passes="logits_at, V, logits_stride, draws_at, count, y_at",
)
def sample(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """A token for each draw: [n] int64, -1 where there is none. `sampling.draw_tokens` says more.

    logits: [R, V] float32 with contiguous rows. draws: the bytes of n draws (`sampling.DRAW`), whose rows exist.
    """
    return backend_of(logits).sample(logits, draws)
