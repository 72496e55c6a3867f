"""The kernels: one Python function for each, whose implementation is chosen by the device of the tensors.

`ops.py`, `row_ops.py`, `expert_ops.py`, `state_ops.py` and `quantized_ops.py` are the table of them: signatures,
shapes, dtypes, checks. `quantized.py` says what the bytes of quantized weights mean. `backends.py` says which back end
answers: the compiled kernels of the CPU (`native.py`) or of a GPU (`cuda.py`), or plain torch (`reference.py`).
"""

from __future__ import annotations

from quire.kernels.backends import backend, backend_of, cuda_backend
from quire.kernels.expert_ops import combine, grouped_linear, route, sort_by_expert
from quire.kernels.ops import linear, paged_attention, write_kv
from quire.kernels.quantized import QuantizedWeight, RowKind, RowLayout, quantize_rows
from quire.kernels.quantized_ops import quantized_embedding, quantized_grouped_linear, quantized_linear
from quire.kernels.row_ops import (
    ACTIVATION_KINDS,
    activation,
    activation_and_mul,
    add,
    add_to,
    clamped_swiglu,
    clip,
    embedding,
    join_heads,
    layer_norm,
    layer_norm_heads,
    likeliest,
    multiply_rows,
    rms_norm,
    rms_norm_heads,
    rotary,
    scale,
    sum_rows,
    xielu,
)
from quire.kernels.state_ops import causal_conv1d, gated_norm, selective_scan

__all__ = [
    "ACTIVATION_KINDS",
    "QuantizedWeight",
    "RowKind",
    "RowLayout",
    "activation",
    "activation_and_mul",
    "add",
    "add_to",
    "backend",
    "backend_of",
    "causal_conv1d",
    "clamped_swiglu",
    "clip",
    "combine",
    "cuda_backend",
    "embedding",
    "gated_norm",
    "grouped_linear",
    "join_heads",
    "layer_norm",
    "layer_norm_heads",
    "likeliest",
    "linear",
    "multiply_rows",
    "paged_attention",
    "quantize_rows",
    "quantized_embedding",
    "quantized_grouped_linear",
    "quantized_linear",
    "rms_norm",
    "rms_norm_heads",
    "rotary",
    "route",
    "scale",
    "selective_scan",
    "sort_by_expert",
    "sum_rows",
    "write_kv",
    "xielu",
]
