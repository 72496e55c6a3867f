"""The rows of the table (see `ops.py`) about quantized weights, whose rows are bytes (`quantized.py`).

Shapes: T tokens, R rows, K in-features, N out-features, C channels, V rows of a table, E experts. Which arithmetic a
weight has, its kind says. F32, F16, BF16, affine and table rows become x's dtype, each number rounded once, and are
multiplied as `linear` does; on a GPU, rows of all kinds are. On a CPU the others are multiplied as whole numbers: x is
made int8, each token by itself, by groups of 32 columns with a scale each (INT8_ROWS: with one scale), the products
within a group are exact, and groups are added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.kernels.backends import backend_of
from quire.kernels.ops import result_dtype
from quire.kernels.table import Contiguous, Let, Rows, kernel

if TYPE_CHECKING:
    from quire.kernels.adapters import LoraSegments, LoraTable
    from quire.kernels.binding import Place
    from quire.kernels.quantized import QuantizedWeight
    from quire.kernels.quantized_experts import QuantizedExpertWeights


def _check_rows(place: Place, name: str, weight: QuantizedWeight) -> int:
    """How many rows it has."""
    data, layout = weight.data, weight.layout
    shape = data.shape
    if (
        data.dtype is not torch.uint8
        or len(shape) != 2
        or shape[1] != layout.row_bytes
        or not place.here(data)
        or not data.is_contiguous()
    ):
        place.reject(name, data, f"[N, {layout.row_bytes}], contiguous", torch.uint8)
    return shape[0]


def _weight_list(
    place: Place,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    features: int,
    dtype: torch.dtype,
) -> tuple[tuple[int, ...], int]:
    """(data, bias or 0, rows, the weight's numbers) for each weight, flat; and the sum of their rows."""
    if len(weights) != len(biases):
        raise ValueError(f"biases: expected one or None for each of {len(weights)} weights, got {len(biases)}")
    here, total = place.here, 0
    flat: list[int] = []
    for weight, bias in zip(weights, biases):  # noqa: B905 (the lengths were compared above)
        rows = _check_rows(place, "weights", weight)
        if weight.layout.features != features:
            raise ValueError(f"weights: expected rows of {features} columns, got {weight.layout.features}")
        total += rows
        if bias is not None and (
            bias.dtype is not dtype or bias.shape != (rows,) or not here(bias) or not bias.is_contiguous()
        ):
            place.reject("biases", bias, f"[{rows}], contiguous", dtype)
        flat += weight.data.data_ptr(), 0 if bias is None else bias.data_ptr(), rows, *weight.numbers
    return tuple(flat), total


@kernel(
    tensors={"x": Rows("T K")},
    lets=(
        Let("out_dtype", result_dtype, "out_dtype, dtype"),
        Let("flat, N", _weight_list, "place, weights, biases, K, dtype"),
    ),
    out="T N",
    out_dtype="out_dtype",
    passes="x_at, T, K, x_stride, flat, y_at, code, _CODES[out_dtype]",
)
def quantized_linear(
    x: torch.Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    """`linear` with quantized weights, each of a layout of its own. x and biases: of one dtype, as `linear` has them.

    Returns [T, sum N_i] in `out_dtype` (float32 or, by default, x's dtype). Raises what `linear` raises.
    """
    return backend_of(x).quantized_linear(x, weights, biases, out_dtype, tables, segments)


def _of_experts(
    place: Place, weights: QuantizedExpertWeights, features: int, dtype: torch.dtype
) -> tuple[int, int, int, int, int]:
    """(experts, weights of each, their address, that of their formats, out-features)"""
    if weights.in_features != features or weights.dtype not in (None, dtype) or weights.device.type != place.device:
        raise ValueError(
            f"weights: expected experts of rows of {features} columns on {place.device}, with biases of {dtype}, got "
            f"{weights.in_features} columns on {weights.device} with biases of {weights.dtype}"
        )
    return len(weights), weights.count, weights.address, weights.formats, weights.out_features


@kernel(
    cpu_only="experts of quantized weights",
    tensors={"x": Rows("R K"), "starts": Contiguous("E+1", "int32"), "tokens": Contiguous("R", "int64")},
    lets=(Let("E, count, weights_at, formats_at, N", _of_experts, "place, weights, K, dtype"),),
    out="R N",
    passes="x_at, R, K, x_stride, starts_at, tokens_at, E, count, weights_at, formats_at, N, y_at, code",
)
def quantized_grouped_linear(
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: QuantizedExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    """`grouped_linear` with quantized weights, each of a layout of its own: a row has the bits of `quantized_linear`.

    x, starts, tokens, tables, segments: as `grouped_linear` takes them. Returns [R, N], N the sum of one expert's
    weights' rows. Raises what `grouped_linear` raises.
    """
    return backend_of(x).quantized_grouped_linear(x, starts, tokens, weights, tables, segments)


def _table(place: Place, weight: QuantizedWeight) -> tuple[tuple[int, ...], int]:
    """Its address, 0, its rows and its numbers; and its columns."""
    rows = _check_rows(place, "weight", weight)
    return (weight.data.data_ptr(), 0, rows, *weight.numbers), weight.layout.features


@kernel(
    tensors={"ids": Contiguous("T", "int64"), "added": Contiguous("T C")},
    lets=(Let("table, C", _table, "place, weight"),),
    out="T C",
    passes="ids_at, T, C, table, added_at, y_at, code, scale",
)
def quantized_embedding(
    ids: torch.Tensor,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    added: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return `scale` times rows `ids` [T] int64 of a quantized weight [V, C], plus `added` [T, C]: [T, C] in `dtype`.

    All in float32, rounded once. Raises IndexError for an id outside the rows.
    """
    return backend_of(ids).quantized_embedding(ids, weight, dtype, added, scale)
