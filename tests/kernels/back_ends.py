"""The back ends that kernel tests run on, by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.kernels import reference
from tests.kernels import emulated, on_gpu

try:
    from quire.kernels import native
except ImportError as missing:  # test_backend.py fails where it should be there
    warnings.warn(f"the native kernels are not tested: {missing}", RuntimeWarning, stacklevel=1)
    native = None  # type: ignore[assignment]

# The CPU's, by instruction set, best first; and the GPU's.
CPU: list[str] = native.available_isas() if native else []
# Those with kernels of their own for more than quantized weights: another's are tested once.
OWN = [isa for isa in CPU if isa not in ("avx512vnni", "avxvnni", "narrowvnni")]
CUDA = [pytest.param("emulated", marks=pytest.mark.emulated), pytest.param("gpu", marks=pytest.mark.gpu)]


@contextmanager
def back_end(name: str) -> Iterator[Any]:
    """The module of that name; of the CPU's, with that instruction set."""
    if name in CPU:
        best = native.isa()
        native._C.set_isa(name)
        yield native
        native._C.set_isa(best)
    else:
        yield {"reference": lambda: reference, "emulated": emulated.load, "gpu": on_gpu.load}[name]()
