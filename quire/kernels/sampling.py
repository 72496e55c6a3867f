"""Tokens drawn where their logits lie, on a GPU: `platform/sampling/sampler.py`'s draws without their way to the host.

Each draw is made on its own, of sums of integers, so that it depends on its row and its numbers alone. Weights below
2^-41 of the best token's count as none.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.backends import backend_of, cuda_backend
from quire.kernels.transfer import send

# A `Draw` of csrc/cuda/common/kernels.h. row: of the logits, -1 for no token; uniform: in [0, 1); temperature: 0 for
# the likeliest token; top_p: 1 for no limit; top_k: 0 or less for none.
DRAW = np.dtype(
    [
        ("row", np.int64),
        ("uniform", np.float64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
    ]
)


def draw_tokens(logits: torch.Tensor, draws: NDArray[np.void]) -> torch.Tensor:
    """One token for each draw, [n] int64 on the logits' device; -1 where the row's best logit is NaN or infinite.

    logits: [R, V] float32 with contiguous rows. draws: [n] DRAW; several may name one row. Raises IndexError for a row
    that does not exist.
    """
    if draws.dtype != DRAW or draws.ndim != 1:
        raise TypeError(f"draws: expected [n] of {DRAW}, got {list(draws.shape)} of {draws.dtype}")
    if logits.dim() == 2 and (draws["row"] >= logits.shape[0]).any():
        raise IndexError(f"draws: a row is outside the {logits.shape[0]} of logits")
    table = send(torch.from_numpy(np.ascontiguousarray(draws).view(np.uint8)), logits.device)
    return cuda_backend().sample(logits, table)


def can_draw(logits: torch.Tensor) -> bool:
    """Whether `draw_tokens` works where these logits lie."""
    return logits.dtype is torch.float32 and hasattr(backend_of(logits), "sample")
