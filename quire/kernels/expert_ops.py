"""The rows of the table (see `ops.py`) about experts: tokens choose theirs, and each is computed by its own.

Shapes: T tokens, E experts, k chosen ones of each token, R = T k rows, K in-features, N out-features, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.kernels.backends import backend_of
from quire.kernels.table import Contiguous, Let, Rows, Rule, kernel

if TYPE_CHECKING:
    from quire.kernels.adapters import LoraSegments, LoraTable
    from quire.kernels.binding import Place
    from quire.kernels.experts import ExpertWeights, Routing


def _numbers(routing: Routing, experts: int, chosen: int) -> tuple[float, ...]:
    return routing.numbers(experts, chosen)


@kernel(
    tensors={
        "logits": Rows("T E", "float32"), "experts": Contiguous("T k", "int32"),
        "weights": Contiguous("T k", "float32"), "bias": Contiguous("E", "float32"),
    },
    lets=(Let("numbers_of", _numbers, "routing, E, k"),),
    passes="logits_at, T, E, logits_stride, k, bias_at, *numbers_of, experts_at, weights_at",
)  # fmt: skip
def route(
    logits: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
) -> None:
    """Write which experts each token goes to, [T, k] int32, and how much each counts, [T, k] float32.

    logits: [T, E] float32, rows may be strided. routing: how they are chosen, the best first; k is as many as
    `experts` has room for. bias: [E] float32, added to the scores for the choice alone (arXiv:2408.15664).
    Raises ValueError where so many cannot be chosen.
    """
    backend_of(logits).route(logits, experts, weights, routing, bias)


@kernel(
    tensors={
        "experts": Contiguous("T k", "int32"), "starts": Contiguous("E1", "int32"), "tokens": Contiguous("R", "int64"),
        "places": Contiguous("T k", "int32"),
    },
    rules=(
        Rule("E1 > 1", "starts", "one more than there are experts"),
        Rule("R == T * k", "tokens", "[{T} * {k}]"),
    ),
    passes="experts_at, T, k, starts_at, E1 - 1, tokens_at, places_at",
)  # fmt: skip
def sort_by_expert(experts: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> None:
    """Write where each token's rows stand when all rows are sorted by expert, and an expert's by token.

    experts: [T, k] int32. Writes starts: [E + 1] int32, each expert's first row, and T k; tokens: [T k] int64, each
    row's token; places: [T, k] int32, the row of each token's choice. Raises IndexError for an expert outside 0 .. E.
    """
    backend_of(experts).sort_by_expert(experts, starts, tokens, places)


def _of_experts(place: Place, weights: ExpertWeights, features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(experts, weights of each, their address, out-features)"""
    if weights.dtype is not dtype or weights.in_features != features or weights.device.type != place.device:
        raise ValueError(
            f"weights: expected experts of [N, {features}] {dtype} on {place.device}, got "
            f"[{weights.out_features}, {weights.in_features}] {weights.dtype} on {weights.device}"
        )
    return len(weights), weights.count, weights.address, weights.out_features


@kernel(
    tensors={"x": Rows("R K"), "starts": Contiguous("E+1", "int32"), "tokens": Contiguous("R", "int64")},
    lets=(Let("E, count, weights_at, N", _of_experts, "place, weights, K, dtype"),),
    out="R N",
    passes="x_at, R, K, x_stride, starts_at, tokens_at, E, count, weights_at, N, y_at, code",
)
def grouped_linear(
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: ExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    """`linear` where each row has its own expert's weights: side by side, with their biases and what adapters add.

    x: [R, K], sorted by expert, rows may be strided; starts, tokens: as `sort_by_expert` writes them. segments: which
    of the step's tokens belong to which adapters; tables: of each expert, the adapters of each weight, or None.
    Returns [R, N], N the sum of one expert's weights' rows. Raises what `linear` raises, and ValueError for rows that
    are not sorted.
    """
    return backend_of(x).grouped_linear(x, starts, tokens, weights, tables, segments)


@kernel(
    tensors={
        "x": Rows("R C"), "places": Contiguous("T k", "int32"), "weights": Contiguous("T k", "float32"),
        "shared": Rows("T C"), "shared_gate": Contiguous("T 1", "float32"),
    },
    out="T C",
    passes="x_at, R, C, x_stride, places_at, T, k, weights_at, shared_at, "
    "0 if shared is None else shared.stride(0), shared_gate_at, y_at, code",
)  # fmt: skip
def combine(
    x: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each token's rows of x [R, C], times their weights, added up in their order in float32: [T, C].

    places: [T, k] int32, rows of x; weights: [T, k] float32. shared: [T, C], added at the end, rows may be strided;
    shared_gate: [T, 1] float32, whose logistic function it is multiplied by. Raises IndexError for a row outside x.
    """
    return backend_of(x).combine(x, places, weights, shared, shared_gate)
