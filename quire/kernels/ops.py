"""The table of kernels. Each row is a public function: its signature, what it computes, what it expects of its tensors.

Everything else follows from the row: the checks and the call of the compiled kernel on the CPU (`native.py`) and on a
GPU (`cuda.py`), and the checks alone for a rehearsal (`rehearsal.py`). `reference.py` has the same function in plain
torch. docs/adding-a-kernel.md shows how a row comes to be.

Shapes: T tokens, K in-features, C channels, H query heads, G key/value heads, D head size, S sequences, B blocks of
each, N rows of a weight. Dtypes: float32, bfloat16 or float16, the same for activations, weights and cache; sums are
kept in float32. No result depends on how many tokens or sequences share the call. Raised for arguments that do not fit:
TypeError (dtype, layout) and ValueError (shape, strides, device), which name the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.kernels.backends import backend_of
from quire.kernels.table import Contiguous, Heads, Let, Rows, Rule, kernel

if TYPE_CHECKING:
    from quire.kernels.adapters import LoraSegments, LoraTable
    from quire.kernels.binding import Place

# In the order of arguments.h.
ACTIVATION_KINDS = (
    "silu", "relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "relu6", "sigmoid", "tanh", "mish",
)  # fmt: skip
_KIND_CODES = {kind: code for code, kind in enumerate(ACTIVATION_KINDS)}
# Of a vocabulary: more could add up to more than the sampler's integers hold.
_MOST_TOKENS = 2**20
_DRAW_BYTES = 32


def _result_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
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
    """(data, bias or 0, rows) for each weight, flat; and the sum of their rows."""
    if len(weights) != len(biases):
        raise ValueError(f"biases: expected one or None for each of {len(weights)} weights, got {len(biases)}")
    here, total = place.here, 0
    flat: list[int] = []
    for weight, bias in zip(weights, biases):  # noqa: B905 (the lengths were compared above)
        shape = weight.shape
        if (
            weight.dtype is not dtype
            or len(shape) != 2
            or shape[1] != features
            or not here(weight)
            or not weight.is_contiguous()
        ):
            place.reject("weights", weight, f"[N, {features}], contiguous", dtype)
        rows = shape[0]
        total += rows
        if bias is None:
            flat += weight.data_ptr(), 0, rows
            continue
        if bias.dtype is not dtype or bias.shape != (rows,) or not here(bias) or not bias.is_contiguous():
            place.reject("biases", bias, f"[{rows}], contiguous", dtype)
        flat += weight.data_ptr(), bias.data_ptr(), rows
    return tuple(flat), total


@kernel(
    tensors={"x": Rows("T K")},
    lets=(
        Let("out_dtype", _result_dtype, "out_dtype, dtype"),
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

    x: [T, K], rows may be strided. weights: each [N_i, K], contiguous. biases: each [N_i] or None.
    segments: which rows belong to which adapters; tables: the adapters of each weight, or None where none changes its
    product. Of a segment's rows, a weight's product y becomes (y + scaling * weight * (x a^T) B^T) * scale + shift
    (arXiv:2106.09685), each adapter at its own rank, sums in float32; other rows stay as they are.
    Returns [T, sum N_i] in `out_dtype` (float32 or, by default, x's dtype). Raises IndexError for rows or slots that
    do not exist, ValueError for segments of another number of rows than T.
    """
    return backend_of(x).linear(x, weights, biases, out_dtype, tables, segments)


@kernel(
    # The cache says what the head size is, the query what the dtype is.
    tensors={
        "keys": Contiguous("blocks G size D"),
        "values": Contiguous("blocks G size D"),
        "query": Heads("T H D"),
        "block_table": Rows("S B", "int32"),
        "query_start": Contiguous("S+1", "int32"),
        "context_len": Contiguous("S", "int32"),
        "slopes": Contiguous("H", "float32"),
    },
    dtype_of="query",
    rules=(Rule("G and H % G == 0", "query", "a multiple of {G} heads"),),
    out="T H D",
    passes="query_at, query_stride, T, H, D, keys_at, values_at, blocks, G, size, block_table_at, block_table_stride, "
    "B, query_start_at, context_len_at, S, scale, y_at, code",
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
) -> torch.Tensor:
    """Causal softmax attention of every token over its sequence's cached keys and values.

    query: [T, H, D], tokens may be strided; keys, values: [num_blocks, G, block_size, D], H a multiple of G;
    block_table: [S, B] int32; query_start: [S + 1] int32; context_len: [S] int32 (includes this step's
    tokens, already stored). Sequence s's tokens are its last `query_start[s+1] - query_start[s]`.
    Slots past a sequence's context are never read. window: a token sees so many keys, its own the last (0: all before
    it). slopes: [H] float32, ALiBi (arXiv:2108.12409): slope * (key's position - the token's) is added to a score.
    The CPU's native kernel has neither of these two, and raises ValueError. Returns [T, H, D], contiguous.
    """
    return backend_of(query).paged_attention(
        query, keys, values, block_table, query_start, context_len, scale, window, slopes
    )


@kernel(
    tensors={
        "keys": Contiguous("blocks G size D"),
        "values": Contiguous("blocks G size D"),
        "slot_mapping": Contiguous("T", "int64"),
        "key": Heads("T key_heads D"),
        "value": Heads("T value_heads D"),
    },
    rules=(Rule("key_heads == G", "key", "{G} heads"), Rule("value_heads == G", "value", "{G} heads")),
    passes="key_at, key_stride, value_at, value_stride, keys_at, values_at, slot_mapping_at, T, G, D, size, blocks, "
    "dtype.itemsize",
)
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store key and value, [T, G, D] (tokens may be strided), into pool slots `slot_mapping` [T] int64.

    keys, values: [num_blocks, G, block_size, D]. Raises IndexError for a slot outside them.
    """
    backend_of(keys).write_kv(key, value, keys, values, slot_mapping)


@kernel(
    tensors={"table": Contiguous("V C"), "ids": Contiguous("T", "int64"), "added": Contiguous("T C")},
    out="T C",
    passes="ids_at, table_at, V, added_at, y_at, T, C, code, scale",
)
def embedding(
    ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Return `scale` times rows `ids` [T] int64 of table [V, C], plus `added` [T, C] where it is given: [T, C].

    Raises IndexError for an id outside the table.
    """
    return backend_of(table).embedding(ids, table, added, scale)


@kernel(
    tensors={"x": Rows("T C"), "weight": Contiguous("C"), "residual": Contiguous("T C")},
    out="T C",
    passes="x_at, T, C, x_stride, weight_at, 0, residual_at, eps, y_at, code, weight_offset, x_scale, 1, 0",
)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    x_scale: float = 1.0,
) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) over the last dimension of x [T, C]; weight [C] or None.

    y = x / rms * (weight + weight_offset), the sum in float32. With `residual` [T, C], `residual += x * x_scale` is
    done first, in place, and the sum is what is normalised; without, x_scale is not looked at.
    """
    return backend_of(x).rms_norm(x, weight, eps, residual, weight_offset, x_scale)


@kernel(
    tensors={
        "x": Rows("T C"), "weight": Contiguous("C"), "bias": Contiguous("C"), "residual": Contiguous("T C"),
    },
    out="T C",
    passes="x_at, T, C, x_stride, weight_at, bias_at, residual_at, eps, y_at, code, weight_offset, x_scale, 1, 0",
)  # fmt: skip
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    x_scale: float = 1.0,
) -> torch.Tensor:
    """LayerNorm (arXiv:1607.06450) over the last dimension of x [T, C]; weight and bias [C] or None.

    `residual`, `weight_offset` and `x_scale` are those of `rms_norm`; an offset is added to a weight alone.
    """
    return backend_of(x).layer_norm(x, weight, bias, eps, residual, weight_offset, x_scale)


_HEAD_WEIGHT = Rule("weight is None or W == 1 or W == H", "weight", "[1, {D}] or [{H}, {D}]")


@kernel(
    tensors={"x": Heads("T H D"), "weight": Contiguous("W D")},
    rules=(_HEAD_WEIGHT,),
    out="T H D",
    calls="rms_norm",
    passes="x_at, T, D, x_stride, weight_at, 0, 0, eps, y_at, code, weight_offset, 1.0, H, D if W > 1 else 0",
)
def rms_norm_heads(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """`rms_norm` of each head of x [T, H, D] by itself; tokens may be strided. Returns [T, H, D], contiguous.

    weight: [1, D] for all heads, [H, D] one for each, or None.
    """
    return backend_of(x).rms_norm_heads(x, weight, eps, weight_offset)


@kernel(
    tensors={"x": Heads("T H D"), "weight": Contiguous("W D"), "bias": Contiguous("W D")},
    rules=(Rule("bias is None or weight is not None", "bias", "None where weight is None"), _HEAD_WEIGHT),
    out="T H D",
    calls="layer_norm",
    passes="x_at, T, D, x_stride, weight_at, bias_at, 0, eps, y_at, code, weight_offset, 1.0, H, D if W > 1 else 0",
)
def layer_norm_heads(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """`layer_norm` of each head of x [T, H, D] by itself; tokens may be strided. Returns [T, H, D], contiguous.

    weight: [1, D] for all heads, [H, D] one for each, or None; bias: of weight's shape, or None.
    """
    return backend_of(x).layer_norm_heads(x, weight, bias, eps, weight_offset)


@kernel(
    tensors={
        "query": Heads("T H D"), "key": Heads("T G D"), "cos_sin": Contiguous("P R", "float32"),
        "positions": Contiguous("T", "int64"),
    },
    rules=(
        Rule("R <= D and R % 2 == 0", "cos_sin", "an even R of at most {D}"),
        Rule("0 <= first <= D - R", "first", "a number from 0 to {D} - {R}"),
    ),
    passes="query_at, query_stride, key_at, key_stride, positions_at, cos_sin_at, T, H, G, D, R, P, code, interleaved, "
    "first",
)  # fmt: skip
def rotary(
    query: torch.Tensor,
    key: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
    first: int = 0,
) -> None:
    """Rotate query [T, H, D] and key [T, G, D] or None in place: rotary embedding (arXiv:2104.09864).

    Tokens may be strided. positions: [T] int64, rows of cos_sin [P, R] float32: R/2 cosines, then R/2 sines.
    Dimensions first .. first + R of a head are turned, in pairs: i and i + R/2, or, interleaved, 2i and 2i + 1. The
    others stay.
    """
    backend_of(query).rotary(query, key, positions, cos_sin, interleaved, first)


def _kind_code(kind: str) -> int:
    code = _KIND_CODES.get(kind)
    if code is None:
        raise ValueError(f"kind: expected one of {', '.join(ACTIVATION_KINDS)}, got {kind!r}")
    return code


@kernel(
    tensors={"x": Rows("T C")},
    lets=(Let("kind_code", _kind_code, "kind"),),
    out="T C",
    passes="x_at, T, C, x_stride, kind_code, False, y_at, code",
)
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply one of ACTIVATION_KINDS to x [T, C] and return the result."""
    return backend_of(x).activation(x, kind)


@kernel(
    tensors={"x": Rows("T C2")},
    rules=(Rule("C2 % 2 == 0", "x", "[T, 2 C]"),),
    lets=(Let("kind_code", _kind_code, "kind"),),
    out="T C2//2",
    calls="activation",
    passes="x_at, T, C2 // 2, x_stride, kind_code, True, y_at, code",
)
def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return act(x[:, :C]) * x[:, C:] for x [T, 2C]: the gated feed-forward (arXiv:2002.05202)."""
    return backend_of(x).activation_and_mul(x, kind)


@kernel(
    tensors={"x": Rows("T C2")},
    rules=(
        Rule("C2 % 2 == 0", "x", "[T, 2 C]"),
        Rule("limit > 0", "limit", "a number above 0"),
    ),
    out="T C2//2",
    passes="x_at, T, C2 // 2, x_stride, alpha, limit, interleaved, y_at, code",
)
def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float, interleaved: bool = False) -> torch.Tensor:
    """gpt-oss's gated feed-forward (arXiv:2508.10925): (up + 1) * gate * sigmoid(alpha * gate), [T, C].

    x: [T, 2 C], gates and then ups, or, interleaved, gate, up, gate, up ... First, gate is cut off above limit, and up
    below -limit and above limit.
    """
    return backend_of(x).clamped_swiglu(x, alpha, limit, interleaved)


@kernel(
    tensors={
        "x": Rows("T C"), "alpha_p": Contiguous("1"), "alpha_n": Contiguous("1"), "beta": Contiguous("1", "float32"),
        "eps": Contiguous("1", "float32"),
    },
    out="T C",
    passes="x_at, T, C, x_stride, alpha_p_at, alpha_n_at, beta_at, eps_at, y_at, code",
)  # fmt: skip
def xielu(
    x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """xIELU (arXiv:2411.13010) of x [T, C], by its trained numbers, each [1]; beta and eps are float32.

    For x > 0, p x^2 + beta x, else n (e^min(x, eps) - 1 - x) + beta x, of p = softplus(alpha_p) and
    n = beta + softplus(alpha_n).
    """
    return backend_of(x).xielu(x, alpha_p, alpha_n, beta, eps)


@kernel(
    tensors={"x": Rows("T C"), "added": Rows("T C")},
    out="T C",
    passes="x_at, x_stride, added_at, added_stride, scale, y_at, T, C, code",
)
def add(x: torch.Tensor, added: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return x + scale * added, [T, C]: the branches of a parallel residual, or a residual with a multiplier."""
    return backend_of(x).add(x, added, scale)


@kernel(
    tensors={"x": Rows("T C")},
    rules=(Rule("cap >= 0", "cap", "0 or more"),),
    out="T C",
    passes="x_at, T, C, x_stride, factor, cap, y_at, code",
)
def scale(x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    """Return factor * x, [T, C]; with a cap above 0, cap * tanh(factor * x / cap): a soft cap."""
    return backend_of(x).scale(x, factor, cap)


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
