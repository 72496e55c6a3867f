"""What a mask of transformers' lets a token see, found out by asking the function that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quire.errors import UnsupportedModelError

# A position beyond every window and chunk that is published.
_FAR = 300_007
_LATER = (1, 2, 1009, 65_537)  # positions behind it at which the answer is looked at again


class Reach(NamedTuple):
    """window, chunk: as of `AttentionSpec`."""

    window: int = 0
    chunk: int = 0

    def first(self, position: int) -> int:
        """The first key that a token sees."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position + 1 - self.window) if self.window else 0


def reach_of(function: Callable[..., Any]) -> Reach:
    """What a mask function of transformers' (batch, head, query's position, key's position) shows to each token.

    Raises UnsupportedModelError for one that is no causal range of keys.
    """
    first, next_first = _first_seen(function, _FAR), _first_seen(function, _FAR + 1)
    if first == 0 and next_first == 0:
        reach = Reach()
    elif next_first == first + 1:
        reach = Reach(window=_FAR + 1 - first)
    elif next_first == first:
        reach = Reach(chunk=_end_of_chunk(function, first) - first)
    else:
        raise UnsupportedModelError("its mask is neither causal, nor a window, nor a chunk.")
    for later in _LATER:
        for position in (_FAR + later, later):
            if _first_seen(function, position) != reach.first(position):
                raise UnsupportedModelError(f"its mask is no plain {reach}: position {position} sees something else.")
    return reach


def _first_seen(function: Callable[..., Any], position: int) -> int:
    """The first of the keys that a token sees, all of which lie side by side and end with its own."""
    keys = torch.arange(position + 3, device="cpu")
    seen = _ask(function, torch.full_like(keys, position), keys)
    count = int(seen.sum())
    first = position + 1 - count
    if count < 1 or not bool(seen[first : position + 1].all()):
        raise UnsupportedModelError("its attention is not causal: a token sees others than a range that ends with it.")
    return first


def _end_of_chunk(function: Callable[..., Any], first: int) -> int:
    queries = torch.arange(first, first + _FAR, device="cpu")
    seen = _ask(function, queries, torch.full_like(queries, first))
    return first + int(seen.sum())


def _ask(function: Callable[..., Any], queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(keys)
    try:
        seen = function(zero, zero, queries, keys)
    except Exception as error:
        raise UnsupportedModelError(f"its mask depends on more than positions: {error!r}") from error
    return torch.as_tensor(seen, dtype=torch.bool).expand(keys.shape)
