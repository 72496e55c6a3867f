"""How the weights of a Linear are stored, loaded and multiplied by: as rows of floats, or in fewer bits.

A Linear owns its format and asks it for whatever depends on the weights' form; LoRA is added on top of any. Rows of
fewer bits are in `quantization/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from quire import kernels
from quire.kernels import packed
from quire.kernels.adapters import LoraSegments, LoraTable


class Layer(Protocol):
    """What a format sees of a Linear."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    format: WeightFormat
    _non_persistent_buffers_set: set[str]
    _parameters: dict[str, nn.Parameter | None]
    _buffers: dict[str, torch.Tensor | None]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None: ...

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None: ...


class WeightFormat(Protocol):
    """One object for all layers of a format: what differs between layers lies in their tensors."""

    def add_tensors(self, layer: Layer, bias: bool) -> None:
        """Give a layer the parameters and persistent buffers that a checkpoint's tensors of these names fill.

        Parameters get the model's dtype when they are loaded; buffers keep the one with which they are made.
        """

    def multiply(
        self,
        x: torch.Tensor,
        layers: Sequence[Layer],
        out_dtype: torch.dtype | None = None,
        tables: Sequence[LoraTable | None] = (),
        segments: LoraSegments | None = None,
    ) -> torch.Tensor:
        """The products of x [T, in_features] with several layers' weights side by side, with their biases.

        tables, segments: what adapters add, as `kernels.linear` takes them. A row's bits do not depend on the others.
        """

    def nbytes(self, layer: Layer) -> int:
        """Bytes that a product reads of the layer's weights; its bias is not among them."""

    def rows(self, layer: Layer, first: int, end: int) -> torch.Tensor:
        """The weights of the outputs `first` .. `end` as float32, [end - first, in_features]: what DoRA's norms are
        taken of, and what tests compare with."""


class FloatRows:
    """Rows of bfloat16, float16 or float32, whichever the model has, as the checkpoint's tensors lie or packed.

    weight: [out_features, in_features], or as `kernels/packed.py` has it; bias: [out_features] or None.
    """

    def add_tensors(self, layer: Layer, bias: bool) -> None:
        layer.weight = _parameter(layer.out_features, layer.in_features)
        layer.register_parameter("bias", _parameter(layer.out_features) if bias else None)

    def multiply(
        self,
        x: torch.Tensor,
        layers: Sequence[Layer],
        out_dtype: torch.dtype | None = None,
        tables: Sequence[LoraTable | None] = (),
        segments: LoraSegments | None = None,
    ) -> torch.Tensor:
        parameters: list[Any] = [layer._parameters for layer in layers]  # torch's own look-up is slow
        weights, biases = [own["weight"] for own in parameters], [own["bias"] for own in parameters]
        return kernels.linear(x, weights, biases, out_dtype, tables, segments)

    def nbytes(self, layer: Layer) -> int:
        return layer.weight.nbytes

    def rows(self, layer: Layer, first: int, end: int) -> torch.Tensor:
        return packed.unpack(layer.weight, first, end).float()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


FLOAT_ROWS = FloatRows()
