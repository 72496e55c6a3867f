"""The weight format of every quantized layer: rows of bytes, whose layout says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.quantized import QuantizedWeight, RowKind, RowLayout
from quire.layers.weight_formats import Layer

_META = torch.device("meta")
FLOAT_KINDS = {torch.float32: RowKind.F32, torch.float16: RowKind.F16, torch.bfloat16: RowKind.BF16}


@dataclass(frozen=True)
class QuantizedRows:
    """weight: [out_features, row_bytes] uint8; bias: [out_features] or None; see `kernels.quantized_linear`.

    layout: of the rows. aux: what rows share: a table that codes are looked up in, which has its numbers, or the group
    that each column belongs to, which a file brings; None: nothing.
    """

    layout: RowLayout
    aux: torch.Tensor | None = None

    def add_tensors(self, layer: Layer, bias: bool) -> None:
        rows = torch.empty((layer.out_features, self.layout.row_bytes), dtype=torch.uint8, device=_META)
        layer.weight = nn.Parameter(rows, requires_grad=False)
        own = torch.empty(layer.out_features, device=_META)
        layer.register_parameter("bias", nn.Parameter(own, requires_grad=False) if bias else None)
        if self.aux is not None:
            layer._non_persistent_buffers_set.discard("aux")
            layer.register_buffer("aux", self.aux, persistent=self.aux.is_meta)

    def multiply(
        self,
        x: torch.Tensor,
        layers: Sequence[Layer],
        out_dtype: torch.dtype | None = None,
        tables: Sequence[LoraTable | None] = (),
        segments: LoraSegments | None = None,
    ) -> torch.Tensor:
        biases: list[Any] = [layer._parameters["bias"] for layer in layers]
        return kernels.quantized_linear(x, [weight_of(layer) for layer in layers], biases, out_dtype, tables, segments)

    def nbytes(self, layer: Layer) -> int:
        return layer.weight.nbytes

    def rows(self, layer: Layer, first: int, end: int) -> torch.Tensor:
        return weight_of(layer).dequantize(first, end)


def weight_of(layer: Layer) -> QuantizedWeight:
    """A layer's weight as kernels take it, made once: a layer of floats among quantized ones is rows of bytes, too."""
    parameter: Any = layer._parameters["weight"]
    kept: tuple[int, QuantizedWeight] | None = layer.__dict__.get("_kept_weight")
    if kept is not None and kept[0] == parameter.data_ptr() and kept[1].data.device == parameter.device:
        return kept[1]
    form, rows = layer.format, parameter.data
    if isinstance(form, QuantizedRows):
        made = QuantizedWeight(rows, form.layout, layer._buffers.get("aux"))
    else:
        made = QuantizedWeight(rows.view(torch.uint8), RowLayout(FLOAT_KINDS[rows.dtype], rows.shape[1]))
    layer.__dict__["_kept_weight"] = parameter.data_ptr(), made
    return made
