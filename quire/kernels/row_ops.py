"""The table's rows for what goes row by row or head by head: look-ups, norms, rotation, activations, sums.

Shapes: T tokens, C channels, H query heads, G key heads, D head size. `ops.py` says what holds for all rows.
"""

from __future__ import annotations

import torch

from quire.kernels.backends import backend_of
from quire.kernels.table import Contiguous, Heads, Let, Packable, Rows, Rule, Strided, kernel

# In the order of arguments.h.
ACTIVATION_KINDS = (
    "silu", "relu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "relu6", "sigmoid", "tanh", "mish",
)  # fmt: skip
_KIND_CODES = {kind: code for code, kind in enumerate(ACTIVATION_KINDS)}


@kernel(
    tensors={"table": Packable("V C"), "ids": Contiguous("T", "int64"), "added": Contiguous("T C")},
    out="T C",
    passes="ids_at, table_at, V, added_at, y_at, T, C, code, scale",
)
def embedding(
    ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """Return `scale` times rows `ids` [T] int64 of table [V, C], plus `added` [T, C] where it is given: [T, C].

    On a CPU the table may be packed (`packed.py`), as the weights of a projection that shares it are.
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


@kernel(
    tensors={"first": Strided("T H A"), "second": Strided("T H B")},
    out="T H A+B",
    passes="first_at, first_stride, first_step, A, second_at, second_stride, second_step, B, y_at, T, H, code",
)
def join_heads(first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
    """Return first [T, H, A] and, behind each of its heads, that of second [T, H, B]: [T, H, A + B], contiguous.

    A copy, and no arithmetic. Tokens and heads may lie anywhere, so that it also puts heads before tokens, and back.
    """
    return backend_of(first).join_heads(first, second)


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
    tensors={"logits": Contiguous("R V", "float32")},
    rules=(Rule("V > 0", "logits", "[R, V], V at least 1"),),
    out="R",
    out_dtype="_INT64",
    cpu_only="drawing tokens in main memory",
    passes="logits_at, R, V, y_at",
)
def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest logits of each row of [R, V] float32: [R] int64, -1 where that is NaN or infinite.

    NaN counts as the largest.
    """
    return backend_of(logits).likeliest(logits)


@kernel(
    tensors={"x": Rows("T C"), "query_start": Contiguous("S1", "int32"), "sums": Contiguous("S1-1 C", "float64")},
    rules=(Rule("S1 > 0", "query_start", "[S + 1]"),),
    cpu_only="vectors that are means of hidden states",
    passes="x_at, T, C, x_stride, query_start_at, S1 - 1, sums_at, code",
)
def sum_rows(x: torch.Tensor, query_start: torch.Tensor, sums: torch.Tensor) -> None:
    """Add to sums [S, C] float64, in place, the rows of x [T, C] that are each sequence's, one after the other.

    query_start: [S + 1] int32, ascending: sequence s has the rows query_start[s] .. query_start[s + 1]. Since rows are
    added one by one, a sequence's sum has the same bits whatever it is cut into and whatever lies beside it.
    Raises ValueError for starts that descend, or do not begin with 0 and end with T.
    """
    backend_of(x).sum_rows(x, query_start, sums)


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
    tensors={"x": Contiguous("T C"), "added": Rows("T C")},
    calls="add",
    passes="x_at, C, added_at, added_stride, scale, x_at, T, C, code",
)
def add_to(x: torch.Tensor, added: torch.Tensor, scale: float = 1.0) -> None:
    """x += scale * added, in place: a residual stream [T, C] to which no norm adds."""
    backend_of(x).add_to(x, added, scale)


@kernel(
    tensors={"x": Rows("T C")},
    rules=(Rule("cap >= 0", "cap", "0 or more"),),
    out="T C",
    passes="x_at, T, C, x_stride, factor, cap, y_at, code, 0.0, 0",
)
def scale(x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    """Return factor * x, [T, C]; with a cap above 0, cap * tanh(factor * x / cap): a soft cap."""
    return backend_of(x).scale(x, factor, cap)


@kernel(
    tensors={"x": Rows("T C"), "factors": Contiguous("T", "float32")},
    out="T C",
    calls="scale",
    passes="x_at, T, C, x_stride, 1.0, 0.0, y_at, code, 0.0, factors_at",
)
def multiply_rows(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return x [T, C], each row times its own factor: [T, C]. factors: [T] float32."""
    return backend_of(x).multiply_rows(x, factors)


@kernel(
    tensors={"x": Rows("T C")},
    rules=(Rule("limit > 0", "limit", "a number above 0"),),
    out="T C",
    calls="scale",
    passes="x_at, T, C, x_stride, 1.0, 0.0, y_at, code, limit, 0",
)
def clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Return x [T, C] with its elements held between -limit and limit; a NaN stays one."""
    return backend_of(x).clip(x, limit)
