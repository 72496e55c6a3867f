"""Experts whose weights are quantized: rows of x by their own expert's, one call of `quantized_linear` an expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.experts import expert_segments
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.quantized_ops import quantized_linear


def quantized_grouped_linear(
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: Sequence[Sequence[QuantizedWeight]],
    biases: Sequence[Sequence[torch.Tensor | None]],
    tables: Sequence[Sequence[LoraTable | None]] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    """`grouped_linear` with quantized weights: of each expert as many, each of a layout of its own, with their biases.

    x, starts, tokens, tables, segments: as `grouped_linear` takes them. Returns [R, N], N the sum of one expert's
    weights' rows. How many rows an expert has is asked for, so that a step cannot be recorded. Raises what
    `quantized_linear` raises.
    """
    y = torch.empty((x.shape[0], sum(len(weight) for weight in weights[0])), dtype=x.dtype, device=x.device)
    # Numbers of a rehearsal's are not there: it goes through the first expert.
    ends = [0, x.shape[0], *[x.shape[0]] * (len(weights) - 1)] if x.is_meta else starts.tolist()
    for expert, (first, end) in enumerate(pairwise(ends)):
        if first == end:
            continue
        own = None if segments is None else expert_segments(segments, tokens[first:end])
        own_tables = () if segments is None else tables[expert]
        y[first:end] = quantized_linear(x[first:end], weights[expert], biases[expert], None, own_tables, own)
    return y
