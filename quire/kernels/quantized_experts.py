"""Where an experts' layer of quantized weights has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.adapters import LoraTable, check_tables
from quire.kernels.experts import WEIGHT
from quire.kernels.quantized import QuantizedWeight

# The rows of csrc/arguments.h's RowFormat.
_FORMAT = np.dtype(
    [("kind", "<i4"), ("zeros", "?"), ("row_bytes", "<i8"), ("group", "<i8"), ("aux", "<u8")], align=True
)


class QuantizedExpertWeights:
    """The weights of E experts, each a list of as many `QuantizedWeight`s [N_i, K], and their biases.

    All experts' lists are of the same N_i; each weight has a layout of its own. address, formats: where the rows lie
    that the kernel reads. dtype: of the biases; None: there are none. Raises ValueError.
    """

    def __init__(
        self,
        weights: Sequence[Sequence[QuantizedWeight]],
        biases: Sequence[Sequence[torch.Tensor | None]] | None = None,
    ) -> None:
        self.weights = weights
        self.biases = [[None] * len(own) for own in weights] if biases is None else biases
        first = weights[0]
        self.count, self.rows = len(first), [len(weight) for weight in first]
        self.out_features = sum(self.rows)
        self.in_features, self.device = first[0].layout.features, first[0].data.device
        self.dtype = next((one.dtype for own in self.biases for one in own if one is not None), None)
        self._entries = np.zeros(len(weights) * self.count, WEIGHT)
        self._formats = np.zeros(len(self._entries), _FORMAT)
        for e, (own, own_biases) in enumerate(zip(weights, self.biases, strict=True)):
            for i, (weight, bias) in enumerate(zip(own, own_biases, strict=True)):
                self._check(f"[{e}][{i}]", weight, bias, self.rows[i])
                kind, zeros, row_bytes, group, aux = weight.numbers
                place = e * self.count + i
                self._entries[place] = weight.data.data_ptr(), 0 if bias is None else bias.data_ptr(), len(weight)
                self._formats[place] = kind, zeros, row_bytes, group, aux
        self.address: int = self._entries.ctypes.data
        self.formats: int = self._formats.ctypes.data

    def __len__(self) -> int:
        return len(self.weights)

    def _check(self, place: str, weight: QuantizedWeight, bias: torch.Tensor | None, rows: int) -> None:
        data, layout = weight.data, weight.layout
        if layout.features != self.in_features:
            raise ValueError(f"weights{place}: expected rows of {self.in_features} columns, got {layout.features}")
        shape = (rows, layout.row_bytes)
        if tuple(data.shape) != shape or data.dtype is not torch.uint8 or data.device != self.device:
            raise ValueError(
                f"weights{place}: expected {list(shape)} torch.uint8 on {self.device}, got {list(data.shape)} "
                f"{data.dtype} on {data.device}"
            )
        if not data.is_contiguous():
            raise ValueError(f"weights{place}: expected contiguous rows, got strides {data.stride()}")
        if bias is None:
            return
        fits = tuple(bias.shape) == (rows,) and bias.dtype is self.dtype and bias.device == self.device
        if not fits or not bias.is_contiguous():
            raise ValueError(
                f"biases{place}: expected [{rows}] {self.dtype} on {self.device}, contiguous, got {list(bias.shape)} "
                f"{bias.dtype} on {bias.device}"
            )

    def check_tables(self, tables: Sequence[Sequence[LoraTable | None]], dtype: torch.dtype) -> None:
        """Raise ValueError where a table is not its weight's, for x of dtype."""
        if len(tables) != len(self.weights):
            raise ValueError(f"tables: expected a list for each of {len(self.weights)} experts, got {len(tables)}")
        for own, weights in zip(tables, self.weights, strict=True):
            check_tables(own, weights, self.in_features, dtype)
