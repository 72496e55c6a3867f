"""The rows of the table (see `ops.py`) about layers with states (Mamba-2): convolution, recurrence, gate.

Shapes: T tokens, S sequences, B places in a block table, C channels, K taps of a convolution, H heads of P dimensions,
Z size of a state, G groups of heads, N blocks of states, each of which has two, as `types.StateCache` says.

A sequence's tokens are the last of its context, as in `paged_attention`. They go on from the state behind those before
them, which is in the block of the last of these. Behind a block's last token, and behind the step's, a state is left in
the block; where the table has none (below 0), none is left, but the step's last token must have one. A call can be
repeated: it reads a state and writes the block's other one.
"""

from __future__ import annotations

import torch

from quire.kernels.backends import backend_of
from quire.kernels.table import Contiguous, Let, Rows, Rule, kernel

MOST_TAPS = 16
_FOR = "layers with states (Mamba-2)"
_PAST = {
    "block_table": Rows("S B", "int32"),
    "query_start": Contiguous("S+1", "int32"),
    "context_len": Contiguous("S", "int32"),
}
_SIZE = Rule("block_size >= 1", "block_size", "1 or more")
_PAST_PASSES = "block_table_at, S, B, block_table_stride, query_start_at, context_len_at, block_size"


@kernel(
    cpu_only=_FOR,
    tensors={
        "x": Rows("T C"), "weight": Contiguous("C K"), "bias": Contiguous("C"), "scales": Contiguous("C", "float32"),
        "tails": Contiguous("N 2 K-1 C"), "tail_ends": Contiguous("N 2", "int64"), **_PAST,
    },
    rules=(Rule(f"2 <= K <= {MOST_TAPS}", "weight", f"[{{C}}, from 2 to {MOST_TAPS}]"), _SIZE),
    out="T C",
    passes="x_at, T, C, x_stride, weight_at, K, bias_at, scales_at, tails_at, N, tail_ends_at, "
    f"{_PAST_PASSES}, y_at, code",
)  # fmt: skip
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    tails: torch.Tensor,
    tail_ends: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """SiLU of each channel's convolution with its own past: [T, C].

    y[t] = silu(bias + sum over k of weight[:, k] * scales * x[t - K + 1 + k]), the sum in float32. x: [T, C], rows may
    be strided; weight: [C, K]; bias: [C]; scales: [C] float32, or None for 1. tails: [N, 2, K - 1, C], inputs that the
    states hold; tail_ends: [N, 2] int64, behind how many tokens. block_table: [S, B] int32, each block of so many
    tokens; query_start: [S + 1]; context_len: [S] int32. Raises ValueError for a sequence whose state is not there.
    """
    return backend_of(x).causal_conv1d(
        x, weight, bias, scales, tails, tail_ends, block_table, query_start, context_len, block_size
    )


def _check_limits(dt_min: float, dt_max: float) -> None:
    if not dt_min <= dt_max:
        raise ValueError(f"dt_min: expected a number up to dt_max={dt_max}, got {dt_min}")


@kernel(
    cpu_only=_FOR,
    tensors={
        "x": Rows("T C"), "dt": Rows("T H"), "a_log": Contiguous("H"), "dt_bias": Contiguous("H"),
        "d": Contiguous("H"), "states": Contiguous("N 2 H Z P", "float32"), "state_ends": Contiguous("N 2", "int64"),
        **_PAST,
    },
    rules=(
        Rule("groups >= 1 and H % groups == 0", "groups", "a divisor of {H} heads"),
        Rule("C == H * P + 2 * groups * Z", "x", "[{T}, {H} * {P} + 2 * groups * {Z}]"),
        _SIZE,
    ),
    lets=(Let("", _check_limits, "dt_min, dt_max"),),
    out="T H*P",
    passes="x_at, T, x_stride, dt_at, H, dt_stride, a_log_at, dt_bias_at, d_at, states_at, N, Z, P, state_ends_at, "
    f"{_PAST_PASSES}, groups, dt_scale, dt_min, dt_max, y_at, code",
)  # fmt: skip
def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    state_ends: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    block_size: int,
    groups: int,
    dt_scale: float,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """Mamba-2's recurrence (arXiv:2405.21060) of each head, token by token, in float32: [T, H P].

    h = h * exp(dt A) + dt B x and y = C h + D x, with A = -exp(a_log) and dt = softplus(dt * dt_scale + dt_bias), kept
    within dt_min and dt_max. x: [T, H P + 2 G Z], all heads' x, then all groups' B, then all groups' C; dt: [T, H];
    rows may be strided. a_log, dt_bias, d: [H]. states: [N, 2, H, Z, P] float32; state_ends: [N, 2] int64, behind how
    many tokens. The others are as of `causal_conv1d`. Raises ValueError for a sequence whose state is not there.
    """
    return backend_of(x).selective_scan(
        x, dt, a_log, dt_bias, d, states, state_ends, block_table, query_start, context_len, block_size, groups,
        dt_scale, dt_min, dt_max,
    )  # fmt: skip


@kernel(
    cpu_only=_FOR,
    tensors={"x": Rows("T C"), "gate": Rows("T C"), "weight": Contiguous("C")},
    rules=(Rule("groups >= 1 and C % groups == 0", "groups", "a divisor of {C} channels"),),
    out="T C",
    passes="x_at, T, C, x_stride, gate_at, gate_stride, weight_at, groups, eps, gate_scale, norm_first, y_at, code",
)
def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    gate_scale: float = 1.0,
    norm_first: bool = False,
) -> torch.Tensor:
    """Return x * silu(gate * gate_scale), [T, C]; with a weight [C], RMSNorm of that by groups of channels, times it.

    norm_first: x is normalised before it is multiplied by the gate's SiLU. x, gate: [T, C], rows may be strided.
    """
    return backend_of(x).gated_norm(x, gate, weight, groups, eps, gate_scale, norm_first)
