"""Weights of a linear layer in the form that some CPUs multiply by fastest (csrc/cpu/linear/columns.h).

A weight [N, K] of bfloat16 becomes [N / 32, 16, K / 32, 64], in the same memory: groups of 32 rows; in each, for each
of a product's 16 partial sums, in `_ORDER`, the pairs of columns that it takes, one pair of every row after the other.
Products with it have the very bits of those with its rows. Its shape says that it is packed: `kernels.linear` and
`kernels.embedding` take it, and what would take it for a matrix fails. Only whole groups of it can be cut off
(`slice_rows`).
"""

from __future__ import annotations

import torch

GROUP, CHAINS, STEP = 32, 16, 32  # rows; partial sums; columns of which each partial sum takes a pair
PAIRS = 2 * GROUP  # numbers of one partial sum in a step
_ORDER = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15)  # kOrder: which partial sum stands at which place
_PLACES = sorted(range(CHAINS), key=_ORDER.__getitem__)


def is_form(shape: torch.Size, features: int) -> bool:
    """Whether a packed weight of so many columns has this shape."""
    return len(shape) == 4 and shape[1] == CHAINS and shape[2] * STEP == features and shape[3] == PAIRS


def is_packed(weight: torch.Tensor) -> bool:
    return weight.dim() == 4


def num_rows(shape: torch.Size) -> int:
    """N, by the shape of a weight that may be packed."""
    return shape[0] * GROUP if len(shape) == 4 else shape[0]


def marked_shape(shape: torch.Size) -> tuple[int, ...]:
    """(-N, K) of a packed weight's shape, as the compiled kernels are told of one; any other shape as it is."""
    return (-shape[0] * GROUP, shape[2] * STEP) if is_form(shape, shape[2] * STEP) else shape


def memory(weight: torch.Tensor) -> torch.Tensor:
    """Where a weight lies, as [N, K]: to be written to, and packed anew."""
    return weight.view(num_rows(weight.shape), -1)


def as_packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K], whose memory is packed, in the shape that says so."""
    return weight.view(len(weight) // GROUP, CHAINS, -1, PAIRS)


def slice_rows(weight: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The rows `first` .. `end` of a weight that may be packed, in the form that it has: whole groups, if it is."""
    return weight[first // GROUP : end // GROUP] if is_packed(weight) else weight[first:end]


def unpack(weight: torch.Tensor, first: int = 0, end: int | None = None) -> torch.Tensor:
    """The rows `first` .. `end` as they were, of a weight that may be packed: [end - first, K]; a copy, if it is."""
    if end is None:
        end = num_rows(weight.shape)
    if not is_packed(weight):
        return weight[first:end]
    start, stop = first // GROUP, -(-end // GROUP)
    groups = weight[start:stop].unflatten(3, (GROUP, 2))[:, _PLACES]
    # [groups, rows, steps, partial sums, 2]: a step's pairs in the order of its columns.
    rows = groups.permute(0, 3, 2, 1, 4).reshape(-1, weight.shape[2] * STEP)
    return rows[first - start * GROUP : end - start * GROUP]
