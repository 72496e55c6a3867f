"""Masks for a step's rows, by a thread of their own: they are computed while the model is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

Words = NDArray[np.int32]


@cache
def _threads() -> tuple[ThreadPoolExecutor, LLExecutor]:
    """One thread asks, and those of llguidance's compute: Python's lock is free meanwhile."""
    return ThreadPoolExecutor(1, "quire-masks"), LLExecutor()


def fill(matchers: Sequence[LLMatcher], allowed: Words) -> Words:
    """The masks [matchers, words] of what each allows next, of `allowed` [words]."""
    masks = np.empty((len(matchers), len(allowed)), np.int32)
    one = len(allowed) * 4
    if len(matchers) == 1:
        matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, one)
    else:
        places = [(matcher, place) for place, matcher in enumerate(matchers)]
        _threads()[1].unsafe_compute_mask_ptr(places, masks.ctypes.data, one, len(places))
    masks &= allowed
    return masks


def start(matchers: Sequence[LLMatcher], allowed: Words) -> Future[Words]:
    """The same, in the background; nobody may touch the matchers until it is done."""
    return _threads()[0].submit(fill, matchers, allowed)
