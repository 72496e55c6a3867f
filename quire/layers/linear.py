"""The linear layers. Every matrix product of every model goes through this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from quire import kernels
from quire.kernels.adapters import LoraSegments
from quire.layers.adapters import LinearAdapters
from quire.layers.shards import shard_of
from quire.layers.weight_formats import FLOAT_ROWS, WeightFormat


class Linear(nn.Module):
    """y = x W^T + b, with W [out_features, in_features] in the form that the checkpoint has.

    format: that form, which says what the layer's tensors are and how to multiply by them.
    adapters: what LoRA adapters change here; None while none does.
    packs: whether the weight may be packed (`kernels/packed.py`). A subclass that looks at it as rows says no.
    """

    packs: ClassVar[bool] = True
    format: WeightFormat
    adapters: LinearAdapters | None = None
    weight: nn.Parameter

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.set_format(FLOAT_ROWS, bias)

    def set_format(self, format: WeightFormat, bias: bool) -> None:
        """Take a format's tensors, before any is loaded."""
        self._parameters.clear()
        self._buffers.clear()
        self.format = format
        format.add_tensors(self, bias)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features], in `out_dtype` (x's by default)."""
        adapters = self.adapters
        if adapters is None or adapters.context.segments is None:
            return self.format.multiply(x, (self,), out_dtype)
        return _adapted_product(x, (self,), out_dtype, (adapters,), adapters)


class MergedLinear:
    """Several Linear layers of one input as one product, without a second copy of their weights.

    It is no module: the parameters stay where the checkpoint names them, and this only looks at them. Some may be
    quantized, each in its own way.
    """

    def __init__(self, *linears: Linear) -> None:
        self.linears = linears

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, sum of out_features], the layers' results side by side."""
        linears = self.linears
        for linear in linears:
            adapters = linear.adapters
            if adapters is not None and adapters.context.segments is not None:
                return _adapted_product(x, linears, None, [one.adapters for one in linears], adapters)
        return _format_of(linears).multiply(x, linears)


def _format_of(linears: Sequence[Linear]) -> WeightFormat:
    """The one that multiplies by all of them: that of rows of bytes, if any has it, takes rows of floats too."""
    for linear in linears:
        if linear.format is not FLOAT_ROWS:
            return linear.format
    return FLOAT_ROWS


def _adapted_product(
    x: torch.Tensor,
    linears: Sequence[Linear],
    out_dtype: torch.dtype | None,
    adapters: Sequence[LinearAdapters | None],
    one: LinearAdapters,
) -> torch.Tensor:
    """The product of x [T, K] with several layers' weights, with what adapters change in them (None: nothing).

    one: of the adapters, some that are not None.
    """
    segments = one.context.for_rows(x.shape[0], one.name)
    tables = [None if own is None else own.table for own in adapters]
    y = _format_of(linears).multiply(x, linears, out_dtype, tables, segments)
    column = 0
    for own, linear in zip(adapters, linears, strict=True):
        first, column = column, column + linear.out_features
        if own is not None and own.replaced:
            _replace(own, linear, segments, x, y[:, first:column])
    return y


def _replace(layer: LinearAdapters, linear: Linear, segments: LoraSegments, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute anew the rows of one layer's product y [T, N] whose adapter replaces weights."""
    shard = shard_of(linear)
    first, last = (0, linear.out_features) if shard is None else shard.rows_of(linear.out_features)
    for start, end, slot, share in segments.rows:
        change = layer.replaced.get(slot)
        if change is None or end <= start:
            continue
        own = x[start:end]
        if change.weight is not None:
            alone = LoraSegments.of([(0, end - start, slot, share)], end - start, x.device)
            weight, bias = change.weight[first:last], None if change.bias is None else change.bias[first:last]
            new = torch.empty((end - start, 0), dtype=y.dtype, device=y.device)
            if first < last:
                new = kernels.linear(own, (weight,), (bias,), y.dtype, (layer.table,), alone)
            y[start:end] = new if shard is None else shard.gather(new, (linear.out_features,))
        trained = change.tokens
        if trained is not None:
            alone = LoraSegments.of([(0, end - start, 0, share)], end - start, x.device)
            table = layer.tokens[slot]
            found = kernels.linear(own, (trained.rows,), (trained.bias,), y.dtype, (table,), alone)
            y[start:end][:, trained.ids] = found
