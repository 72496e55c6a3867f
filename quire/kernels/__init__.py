"""The kernels: one Python function for each, whose implementation is chosen by the device of the tensors.

`ops.py` is the table of them: signatures, shapes, dtypes, checks. `backends.py` says which back end answers: the
compiled kernels of the CPU (`native.py`) or of a GPU (`cuda.py`), or plain torch (`reference.py`).
"""

from __future__ import annotations

from quire.kernels.backends import backend, backend_of, cuda_backend
from quire.kernels.ops import (
    ACTIVATION_KINDS,
    activation,
    activation_and_mul,
    embedding,
    layer_norm,
    linear,
    paged_attention,
    rms_norm,
    rotary,
    write_kv,
)

__all__ = [
    "ACTIVATION_KINDS",
    "activation",
    "activation_and_mul",
    "backend",
    "backend_of",
    "cuda_backend",
    "embedding",
    "layer_norm",
    "linear",
    "paged_attention",
    "rms_norm",
    "rotary",
    "write_kv",
]
