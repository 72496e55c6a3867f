"""Sound from one rate to another: a windowed sinc, evaluated where the new samples are.

Each new sample is a sum over the old ones within so many zero crossings of the sinc, in one order. Below the lower of
the two rates' halves, less a margin, all stays as it is; above it, nothing is left that could be mistaken for
something lower.
"""

from __future__ import annotations

import math

import numpy as np

_CROSSINGS = 32  # of the sinc, on each side
_PASSED = 0.94  # of the band
_BETA = 8.5  # of Kaiser's window: what lies above the band is weaker by some 85 dB
_AT_ONCE = 1 << 20  # numbers
_MOST_TAPS = 4 << 20  # numbers of all filters


def can_resample(rate: int, wanted: int) -> bool:
    """Whether the two rates have a divisor so large that filters between them are not too many."""
    up, half = wanted // math.gcd(rate, wanted), _half(rate, wanted)
    return rate == wanted or up * (2 * half + 1) <= _MOST_TAPS


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """[samples] float32 at `rate` a second -> [ceil(samples * wanted / rate)] float32."""
    if rate == wanted:
        return samples
    shared, half = math.gcd(rate, wanted), _half(rate, wanted)
    up, down = wanted // shared, rate // shared
    count = -(-len(samples) * up // down)
    step = max(1, _AT_ONCE // (2 * half + 1))
    table = np.concatenate([_filters(first, min(first + step, up), up, rate, wanted) for first in range(0, up, step)])
    # Silence on both sides: windows at the ends reach beyond them.
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(count, np.float32)
    for first in range(0, count, step):
        places = np.arange(first, min(first + step, count), dtype=np.int64) * down
        out[first : first + len(places)] = (windows[places // up] * table[places % up]).sum(1, dtype=np.float64)
    return out


def _cutoff(rate: int, wanted: int) -> float:
    return _PASSED * min(1.0, wanted / rate)


def _half(rate: int, wanted: int) -> int:
    """Old samples on each side of a new one that count."""
    return math.ceil(_CROSSINGS / _cutoff(rate, wanted))


def _filters(first: int, end: int, up: int, rate: int, wanted: int) -> np.ndarray:
    """[end - first, taps] float32: what new samples take of the old ones around them, each `place / up` behind one."""
    cutoff, half = _cutoff(rate, wanted), _half(rate, wanted)
    between = np.arange(first, end, dtype=np.float64)[:, None] / up
    away = (np.arange(-half, half + 1, dtype=np.float64)[None] - between) * cutoff
    window = np.i0(_BETA * np.sqrt(np.clip(1.0 - (away / _CROSSINGS) ** 2, 0.0, None))) / np.i0(_BETA)
    taps = np.where(np.abs(away) <= _CROSSINGS, np.sinc(away) * window, 0.0)
    found: np.ndarray = (taps / taps.sum(1, keepdims=True)).astype(np.float32)
    return found
