"""Quantized weights: rows of bytes, and what the bytes mean.

A weight [N, K] is a tensor of bytes [N, row_bytes], each row for itself, so that rows can be permuted, cut, looked up.
`RowLayout` says what a row is made of; the kinds' numbers are those of csrc/arguments.h, GGML's own where it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from quire.kernels import dequantize as rows_of_bytes


class RowKind(IntEnum):
    """What a row's bytes are."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    MXFP4 = 39
    INT8_ROWS = 1000
    """[float32 scale][K int8]"""
    AFFINE4 = 1004
    """[G float32 scales][G float32 zeros, where there are any][codes]: (code - zero) * scale; else zero is 8 or 128"""
    AFFINE8 = 1008
    TABLE4 = 1014
    """[G float32 scales][codes]: table[code] * scale"""
    TABLE8 = 1018


# Columns and bytes of a block.
_BLOCKS = {
    RowKind.F32: (1, 4), RowKind.F16: (1, 2), RowKind.BF16: (1, 2), RowKind.Q4_0: (32, 18), RowKind.Q4_1: (32, 20),
    RowKind.Q5_0: (32, 22), RowKind.Q5_1: (32, 24), RowKind.Q8_0: (32, 34), RowKind.Q2_K: (256, 84),
    RowKind.Q3_K: (256, 110), RowKind.Q4_K: (256, 144), RowKind.Q5_K: (256, 176), RowKind.Q6_K: (256, 210),
    RowKind.MXFP4: (32, 17),
}  # fmt: skip
_BITS = {RowKind.AFFINE4: 4, RowKind.AFFINE8: 8, RowKind.TABLE4: 4, RowKind.TABLE8: 8}
TABLES = {RowKind.TABLE4: 16, RowKind.TABLE8: 256}  # how many numbers a table has
AFFINE = (RowKind.AFFINE4, RowKind.AFFINE8)
_FLOAT_BYTES = 4
# More products of two int8 could add up to more than an int32 holds.
_MOST_INT8 = 2**17


@dataclass(frozen=True)
class RowLayout:
    """What a row of bytes means: its kind; features: K, its columns; of affine and table kinds, `group` columns have
    one scale (0: the whole row), and `zeros` says whether affine rows have zeros of their own.

    Raises ValueError for a layout that there is not.
    """

    kind: RowKind
    features: int
    group: int = 0
    zeros: bool = False

    def __post_init__(self) -> None:
        kind, features = RowKind(self.kind), self.features
        columns = 2 if _BITS.get(kind) == 4 else _BLOCKS.get(kind, (1, 0))[0]
        if features < 1 or features % columns:
            raise ValueError(f"features: {kind.name} rows have a multiple of {columns} columns, got {features}")
        if kind is RowKind.INT8_ROWS and features > _MOST_INT8:
            raise ValueError(f"features: {kind.name} rows have at most {_MOST_INT8} columns, got {features}")
        if self.group < 0 or (self.group and kind not in _BITS):
            wanted = "0 or more" if kind in _BITS else f"0 for {kind.name}"
            raise ValueError(f"group: expected {wanted}, got {self.group}")
        if self.group > features:
            raise ValueError(f"group: expected {features} at most, a row's columns, got {self.group}")
        if self.zeros and kind not in AFFINE:
            raise ValueError(f"zeros: {kind.name} rows have none")

    @property
    def groups(self) -> int:
        """How many scales an affine or table row has."""
        return -(-self.features // (self.group or self.features or 1))

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        if self.kind in _BLOCKS:
            columns, size = _BLOCKS[self.kind]
            return self.features // columns * size
        if self.kind is RowKind.INT8_ROWS:
            size = _FLOAT_BYTES + self.features
        else:
            size = (1 + self.zeros) * _FLOAT_BYTES * self.groups + self.features * _BITS[self.kind] // 8
        return -(-size // 4) * 4

    @cached_property
    def numbers(self) -> tuple[int, int, int, int]:
        """kind, zeros, row_bytes, group: what the extension's functions take."""
        return int(self.kind), int(self.zeros), self.row_bytes, self.group


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight [N, K] as bytes. data: [N, layout.row_bytes] uint8, contiguous.

    aux: of table kinds the table, float32 [16] or [256]; of affine kinds each column's group, int32 [K], where columns
    are not in the order of their groups; else None. Raises ValueError where `aux` does not fit; `data` is looked at by
    the kernels.
    """

    data: torch.Tensor
    layout: RowLayout
    aux: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout, aux = self.layout, self.aux
        entries = TABLES.get(layout.kind)
        if aux is None:
            if entries:
                raise ValueError(f"aux: {layout.kind.name} rows need a table of {entries} numbers")
            return
        wanted = torch.float32 if entries else torch.int32
        size = entries or layout.features
        if not entries and layout.kind not in AFFINE:
            raise ValueError(f"aux: {layout.kind.name} rows have none")
        if aux.dtype is not wanted or tuple(aux.shape) != (size,) or not aux.is_contiguous():
            raise ValueError(f"aux: expected [{size}] {wanted}, contiguous, got {list(aux.shape)} {aux.dtype}")
        if aux.device != self.data.device:
            raise ValueError(f"aux: expected a tensor on {self.data.device}, got one on {aux.device}")
        # A GPU would have to be waited for: its kernels hold groups within their number.
        if not entries and aux.is_cpu and size and not 0 <= int(aux.min()) <= int(aux.max()) < layout.groups:
            raise ValueError(f"aux: groups of columns are from 0 to {layout.groups - 1}")

    def __len__(self) -> int:
        return len(self.data)

    @property
    def shape(self) -> torch.Size:
        """[N, K]"""
        return torch.Size((len(self.data), self.layout.features))

    @cached_property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """The layout's numbers and the address of aux, which stays where it is."""
        return (*self.layout.numbers, 0 if self.aux is None else self.aux.data_ptr())

    def dequantize(self, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows first .. end in float32, [n, K]: for GGML's kinds bit for bit what the `gguf` package makes of them."""
        layout = self.layout
        rows = self.data[first:end].reshape(-1, layout.row_bytes)
        if layout.kind in rows_of_bytes.BLOCKS:
            size = _BLOCKS[layout.kind][1]
            blocks = rows.reshape(-1, size)
            return rows_of_bytes.BLOCKS[layout.kind](blocks).reshape(len(rows), layout.features)
        if layout.kind is RowKind.INT8_ROWS:
            codes = rows[:, _FLOAT_BYTES : _FLOAT_BYTES + layout.features].view(torch.int8)
            return codes.float() * rows[:, :_FLOAT_BYTES].contiguous().view(torch.float32)
        return self._dequantize_packed(rows)

    def _dequantize_packed(self, rows: torch.Tensor) -> torch.Tensor:
        layout, size = self.layout, _FLOAT_BYTES * self.layout.groups
        group = torch.arange(layout.features, device=rows.device) // (layout.group or layout.features or 1)
        if self.aux is not None and layout.kind in AFFINE:
            group = self.aux.long()
        scales, rest = rows[:, :size].contiguous().view(torch.float32)[:, group], rows[:, size:]
        zeros: torch.Tensor | float = 1 << (_BITS[layout.kind] - 1)
        if layout.zeros:
            zeros, rest = rest[:, :size].contiguous().view(torch.float32)[:, group], rest[:, size:]
        codes = rest[:, : layout.features * _BITS[layout.kind] // 8]
        if _BITS[layout.kind] == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        if layout.kind in AFFINE:
            return (codes.float() - zeros) * scales
        assert self.aux is not None  # checked when it was made
        return self.aux[codes.long()] * scales


def quantize_rows(x: torch.Tensor, kind: RowKind) -> torch.Tensor:
    """x [N, K], of floats, as rows of bytes [N, row_bytes]: by groups of 32 columns, each by itself.

    Q8_0: scale = the largest size / 127, codes rounded to the nearest. Q4_0: the scale, of some about the largest
    number / -8, that leaves the least squares of errors; Q4_1: so with a least number, see `_fit_sixteen_levels`.
    Raises ValueError for other kinds, and for K that is no multiple.
    """
    layout = RowLayout(kind, x.shape[1])
    groups = x.float().reshape(-1, 32)
    if kind is RowKind.Q8_0:
        scale = (groups.abs().amax(1) / 127).half()
        codes = (groups * _inverse(scale)).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    elif kind is RowKind.Q4_0:
        scale, levels = _fit_four_bits(groups)
        codes = levels[:, :16] | levels[:, 16:] << 4
    elif kind is RowKind.Q4_1:
        scale, levels = _fit_sixteen_levels(groups)
        codes = levels[:, :16] | levels[:, 16:] << 4
    else:
        raise ValueError(f"kind: expected Q8_0, Q4_0 or Q4_1, got {RowKind(kind).name}")
    return torch.cat((scale.reshape(len(groups), -1).view(torch.uint8), codes), 1).reshape(len(x), layout.row_bytes)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 of 0: [n, 1] float32."""
    wide = scale.float()
    return torch.where(wide == 0, 0, 1 / wide).unsqueeze(1)


def _fit_four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: [n, 32] float32; -> scales [n] float16, inf where none holds a group; and levels [n, 32] uint8, to 15."""
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True)).squeeze(1)
    best = torch.full_like(extreme, torch.inf)
    best_scale = torch.full_like(extreme, torch.inf).half()
    for steps in (-8.0, -7.0, -7.25, -7.5, -7.75, -8.25, -8.5, 7.0, 7.25, 7.5, 7.75, 8.0):
        scale = (extreme / steps).half()
        levels = (groups * _inverse(scale)).round().clamp(-8, 7)
        error = (levels * scale.float().unsqueeze(1) - groups).square().sum(1)
        better = error < best
        best, best_scale = torch.where(better, error, best), torch.where(better, scale, best_scale)
    levels = (groups * _inverse(best_scale)).round().clamp(-8, 7) + 8
    return best_scale, levels.nan_to_num(8).to(torch.uint8)


def _fit_sixteen_levels(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups: [n, 32] float32; -> steps and least numbers [n, 2] float16, and levels [n, 32] uint8, from 0 to 15.

    Where float16 has no such numbers, both are inf.
    Tried are 16 levels from the least number to the largest, and somewhat closer ones, each once as they are and once
    with the line through the numbers that least squares then draws over their levels. What was made of 16 such levels
    is found again.
    """
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best, kept = torch.full_like(low, torch.inf), torch.full((len(groups), 2), torch.inf).half()
    centred = groups - groups.mean(1, keepdim=True)
    for share in (1.0, 0.9):
        step = ((high - low) * (share / 15)).half()
        least = (low + (high - low) * ((1 - share) / 2)).half()
        for fitted in (False, True):
            if fitted:
                levels = _levels(groups, step, least)
                middle = levels.mean(1, keepdim=True)
                spread = (levels - middle).square().sum(1, keepdim=True)
                slope = (centred * (levels - middle)).sum(1, keepdim=True) / spread
                step = torch.where(spread > 0, slope, step.float()).half()
                least = (groups.mean(1, keepdim=True) - step.float() * middle).half()
            made = _levels(groups, step, least) * step.float() + least.float()
            error = (made - groups).square().sum(1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            kept = torch.where(better, torch.cat((step, least), 1), kept)
    return kept, _levels(groups, kept[:, :1], kept[:, 1:]).nan_to_num(0).to(torch.uint8)


def _levels(groups: torch.Tensor, step: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    wide = step.float()
    return ((groups - least.float()) * torch.where(wide == 0, 0, 1 / wide)).round().clamp(0, 15)


def by_rows(weights: Sequence[QuantizedWeight]) -> list[int]:
    """How many rows each has."""
    return [len(weight.data) for weight in weights]
