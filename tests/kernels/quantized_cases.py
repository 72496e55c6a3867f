"""Quantized weights of random bytes whose scales are ordinary numbers."""

from __future__ import annotations

import torch

from quire.kernels import QuantizedWeight, RowKind, RowLayout

# Bytes of a block, and where in it lie half-precision scales.
_HALVES = {
    RowKind.Q4_0: (18, (0,)), RowKind.Q4_1: (20, (0, 2)), RowKind.Q5_0: (22, (0,)), RowKind.Q5_1: (24, (0, 2)),
    RowKind.Q8_0: (34, (0,)), RowKind.Q2_K: (84, (80, 82)), RowKind.Q3_K: (110, (108,)), RowKind.Q4_K: (144, (0, 2)),
    RowKind.Q5_K: (176, (0, 2)), RowKind.Q6_K: (210, (208,)),
}  # fmt: skip
ELEMENTS = {RowKind.F32: torch.float32, RowKind.F16: torch.float16, RowKind.BF16: torch.bfloat16}
GGML = [kind for kind in RowKind if kind < RowKind.INT8_ROWS]
INTEGER = [*(kind for kind in GGML if kind not in ELEMENTS), RowKind.INT8_ROWS]
COLUMNS = {kind: 256 if kind.name.endswith("_K") else 32 for kind in INTEGER} | {RowKind.INT8_ROWS: 1}


def layouts(features: int) -> list[RowLayout]:
    """Those of all kinds that rows of so many columns may have."""
    found = [RowLayout(kind, features) for kind in (*ELEMENTS, *INTEGER) if features % COLUMNS.get(kind, 1) == 0]
    for kind in (RowKind.AFFINE4, RowKind.AFFINE8):
        if features % 2 == 0 or kind is RowKind.AFFINE8:
            groups = (0, min(32, features), min(7, features))
            found += [RowLayout(kind, features, group, zeros) for group in groups for zeros in (False, True)]
    if features % 2 == 0:
        found += [RowLayout(RowKind.TABLE4, features, group) for group in (0, min(64, features))]
    return [*found, RowLayout(RowKind.TABLE8, features), RowLayout(RowKind.TABLE8, features, min(5, features))]


def random_weight(layout: RowLayout, rows: int, seed: int = 0) -> QuantizedWeight:
    """Of about the size of 0.1."""
    generator = torch.Generator().manual_seed(1000 * seed + int(layout.kind))
    data = torch.randint(0, 256, (rows, layout.row_bytes), dtype=torch.uint8, generator=generator)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) * 0.01 + 0.001

    kind, aux = layout.kind, None
    if kind in ELEMENTS:
        values = torch.randn(rows, layout.features, generator=generator) * 0.1
        data = values.to(ELEMENTS[kind]).view(torch.uint8).reshape(rows, -1)
    elif kind in _HALVES:
        size, places = _HALVES[kind]
        blocks = data.view(-1, size)
        for place in places:
            blocks[:, place : place + 2] = (numbers(len(blocks)) / 8).half().view(-1, 1).view(torch.uint8)
    elif kind is RowKind.MXFP4:
        data.view(-1, 17)[:, 0] = data.view(-1, 17)[:, 0] % 8 + 118
    else:
        count = (1 if kind is RowKind.INT8_ROWS else layout.groups) * (1 + layout.zeros)
        floats = numbers(rows, count)
        if layout.zeros:
            floats[:, layout.groups :] = (floats[:, layout.groups :] * 1500).round()
        data[:, : 4 * count] = floats.view(torch.uint8)
    if kind in (RowKind.TABLE4, RowKind.TABLE8):
        aux = torch.randn(16 if kind is RowKind.TABLE4 else 256, generator=generator)
    elif kind is RowKind.AFFINE4 and layout.group == 7:
        aux = torch.randint(0, layout.groups, (layout.features,), dtype=torch.int32, generator=generator)
    return QuantizedWeight(data, layout, aux)


def extreme_weight(layout: RowLayout, rows: int) -> QuantizedWeight:
    """Of an integer kind: the least and the largest codes, and such scales within a block, by turns of rows."""
    size, places = _HALVES.get(layout.kind, (17, (0,)) if layout.kind is RowKind.MXFP4 else (layout.row_bytes, (0, 2)))
    weight = random_weight(layout, rows)
    fill = torch.tensor([0x00, 0x7F, 0x80, 0xFF], dtype=torch.uint8)[torch.arange(rows) % 4]
    data = fill[:, None].expand(rows, layout.row_bytes).clone()
    blocks, made = data.view(rows, -1, size), weight.data.view(rows, -1, size)
    width = 1 if layout.kind is RowKind.MXFP4 else 2
    for place in places:
        blocks[..., place : place + width] = made[..., place : place + width]
    return QuantizedWeight(data, layout)
