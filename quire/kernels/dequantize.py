"""GGML's blocks of bytes as float32, in plain torch: block by block, the bits of the `gguf` package's `dequantize`."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Twice the values of an e2m1 (OCP Microscaling Formats v1.0).
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _floats(blocks: torch.Tensor, first: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """The number at byte `first` of each block: [n, 1] float32."""
    return blocks[:, first : first + dtype.itemsize].contiguous().view(dtype).float()


def _bits(bytes_: torch.Tensor, width: int) -> torch.Tensor:
    """Fields of `width` bits of [.., m] bytes, the lowest of all first: [.., 8 / width, m]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=bytes_.device).unsqueeze(1)
    return bytes_.unsqueeze(-2) >> shifts & ((1 << width) - 1)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """[n, 16] bytes: the low halves, then the high ones: [n, 32]."""
    return _bits(bytes_, 4).flatten(1)


def _fifths(bytes_: torch.Tensor) -> torch.Tensor:
    """The fifth bits of 32 columns of [n, 4] bytes, in place: [n, 32]."""
    return _bits(bytes_, 1).transpose(1, 2).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _floats(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _floats(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _floats(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = (_nibbles(blocks[:, 6:]) | _fifths(blocks[:, 2:6])).to(torch.int8) - 16
    return _floats(blocks, 0) * codes.float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifths(blocks[:, 4:8])
    return _floats(blocks, 0) * codes.float() + _floats(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _floats(blocks, 0)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, low = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    scale, minimum = _floats(blocks, 80) * scales.float(), _floats(blocks, 82) * low.float()
    return scale.unsqueeze(2) * codes - minimum.unsqueeze(2)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = _bits(blocks[:, 96:104], 4).flatten(1), _bits(blocks[:, 104:108], 2).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256).to(torch.int8)
    codes -= (_bits(blocks[:, :32], 1).reshape(-1, 256) ^ 1).to(torch.int8) << 2
    return (_floats(blocks, 108) * scales.float()).unsqueeze(2) * codes.reshape(-1, 16, 16).float()


def _scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes of a super-block: eight scales and eight minimums of 6 bits each, [n, 8]."""
    scale, minimum, rest = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((scale & 63, rest & 15 | scale >> 2 & 48), 1)
    minimums = torch.cat((minimum & 63, rest >> 4 | minimum >> 2 & 48), 1)
    return scales, minimums


def _super_block(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """codes: [n, 8, 32]"""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    scale, minimum = _floats(blocks, 0) * scales.float(), _floats(blocks, 2) * minimums.float()
    return scale.unsqueeze(2) * codes.float() - minimum.unsqueeze(2)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _super_block(blocks, _bits(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _super_block(blocks, low | _bits(blocks[:, 16:48], 1) << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    codes = (low | high << 4).to(torch.int8) - 32
    scale = _floats(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scale.unsqueeze(2) * codes.reshape(-1, 16, 16).float()


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    values = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    return bits.view(torch.float32) * values[_nibbles(blocks[:, 1:]).long()]


# By RowKind: [n, bytes of a block] uint8 -> float32 of as many numbers in all.
BLOCKS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    0: lambda blocks: blocks.contiguous().view(torch.float32),
    1: lambda blocks: blocks.contiguous().view(torch.float16).float(),
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    10: _q2_k,
    11: _q3_k,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
    30: lambda blocks: blocks.contiguous().view(torch.bfloat16).float(),
    39: _mxfp4,
}
