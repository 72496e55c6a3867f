"""Operands of `linear`, adapters beside them, and what must come out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_helpers import ROUNDING, assert_close, is_gpu, misaligned, randn, same_bits

from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, Segment, pack, unpack

F32 = torch.float32
Tensors = list[torch.Tensor]
Biases = list[torch.Tensor | None]
Layout = Callable[[torch.Tensor], torch.Tensor]


def operands(features: int, rows: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> tuple[Tensors, Biases]:
    """Weights of so many rows; every second one has a bias, beginning with that one."""
    weights = [randn(n, features, dtype=dtype, seed=n) for n in rows]
    return weights, [randn(n, dtype=dtype, seed=n + 1) if i % 2 == first else None for i, n in enumerate(rows)]


def exact_linear(x: torch.Tensor, weights: Tensors, biases: Biases) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 result, and a bound on what float32 sums may lose."""
    wide, parts, sizes = x.double(), [], []
    for weight, bias in zip(weights, biases, strict=True):
        add = torch.zeros(len(weight)).double() if bias is None else bias.double()
        parts.append(wide @ weight.double().T + add)
        sizes.append(wide.abs() @ weight.double().abs().T + add.abs())
    return torch.cat(parts, 1), torch.cat(sizes, 1) * (x.shape[1] / 8 + 8) * ROUNDING[F32]


def lora_weights(
    kernels: Any, rank: int, features: int, columns: int, dtype: torch.dtype, seed: int, extras: bool, odd: bool
) -> LoraWeights:
    """An adapter's share as a back end reads it; odd: at any address."""

    def lay(x: torch.Tensor) -> torch.Tensor:
        return misaligned(x) if odd else x

    a = lay(randn(rank, features, dtype=dtype, seed=seed)) if rank else None
    b = randn(columns, rank, dtype=dtype, seed=seed + 1) if rank else None
    if b is not None:
        b = lay(b if kernels.ROW_MAJOR_B else pack(b))
    scale = lay(randn(columns, dtype=F32, seed=seed + 2)) if extras else None
    shift = lay(randn(columns, dtype=F32, seed=seed + 3)) if extras or not rank else None
    scaling = (0.25 + seed % 3) / (4 if is_gpu(kernels) else 1)
    return LoraWeights(a, b, scaling, scale, shift, kernels.ROW_MAJOR_B)


class Product:
    """A call of `linear` with adapters: weights of some widths, of which every third has no table."""

    def __init__(
        self,
        kernels: Any,
        features: int,
        widths: list[int],
        ranks: dict[int, int],
        dtype: torch.dtype,
        odd: bool = True,
    ) -> None:
        """ranks: of the adapter in each slot; those of odd slots scale and shift besides. odd: at any address."""
        self.kernels = kernels
        self.weights = [randn(n, features, dtype=dtype, seed=n) for n in widths]
        self.biases = [randn(n, dtype=dtype, seed=n) if i % 2 else None for i, n in enumerate(widths)]
        self.tables: list[LoraTable | None] = []
        for layer, columns in enumerate(widths):
            table = None
            if layer % 3 != 2:
                table = LoraTable(features, columns, dtype, 2, row_major=kernels.ROW_MAJOR_B)
                for slot, rank in ranks.items():
                    own = lora_weights(kernels, rank, features, columns, dtype, 10 * slot + layer, slot % 2 == 1, odd)
                    table.put(slot, own)
            self.tables.append(table)

    def __call__(
        self, x: torch.Tensor, rows: list[Segment] | None, out_dtype: torch.dtype | None = None, kernels: Any = None
    ) -> torch.Tensor:
        linear = (kernels or self.kernels).linear
        if rows is None:
            return linear(x, self.weights, self.biases, out_dtype)
        return linear(x, self.weights, self.biases, out_dtype, self.tables, LoraSegments.of(rows, len(x)))

    def exact(self, x: torch.Tensor, y: torch.Tensor, rows: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """What becomes of y in float64, and a bound on what roundings may lose.

        They are those of float32 sums; on a GPU, of x a^T to its dtype besides; on the others, of y in between.
        """
        gpu = is_gpu(self.kernels)
        between = ROUNDING[F32] * 4 if gpu else ROUNDING[y.dtype] * 2
        out, error = y.double().clone(), torch.zeros_like(y, dtype=torch.float64)
        for start, end, slot, weight in rows:
            first = 0
            for table, own_weight in zip(self.tables, self.weights, strict=True):
                columns = len(own_weight)
                own = None if table is None else table.get(slot)
                part, bound = out[start:end, first : first + columns], error[start:end, first : first + columns]
                first += columns
                if own is None:
                    continue
                if own.a is not None:
                    b = own.b if own.row_major else unpack(own.b, columns)
                    wide, a, b = x[start:end].double(), own.a.double(), b.double()
                    hidden, factor = wide @ a.T, own.scaling * weight
                    part += hidden @ b.T * factor
                    if gpu:
                        bound += hidden.abs() @ b.abs().T * abs(factor) * ROUNDING[x.dtype] * 2.02
                    size = wide.abs() @ a.abs().T @ b.abs().T * abs(factor)
                    bound += size * (x.shape[1] / 8 + own.rank + 16) * ROUNDING[F32]
                if own.scale is not None:
                    part *= own.scale.double()
                    bound *= own.scale.double().abs()
                if own.shift is not None:
                    shift, before = own.shift.double(), part.abs()
                    part += shift
                    terms = part.abs() + shift.abs() * 2 if gpu else before + shift.abs()
                    bound += terms * ROUNDING[F32] * 4
                bound += (part.abs() + bound) * between
        return out, error

    def check(self, x: torch.Tensor, rows: list[Segment], out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Close to float64, and the rows of no adapter the base model's bits."""
        base, got = self(x, None, out_dtype), self(x, rows, out_dtype)
        assert_close(got, *self.exact(x, base, rows))
        for row in range(len(x)):
            if not any(start <= row < end for start, end, _, _ in rows):
                assert same_bits(got[row], base[row])
        return got
