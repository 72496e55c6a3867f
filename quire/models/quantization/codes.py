"""Stored numbers of few bits put into the rows of bytes that the kernels read (`quire.kernels.quantized`).

An affine row: scales as float32, one a group of columns; zero points as float32, where there are any; one code a
column, in a nibble (the even column's is the lower one) or a byte; zeros up to four bytes. w = (code - zero) * scale,
where the zero is 8 or 128 if none is stored. A row with a table has no zero points: w = table[code] * scale.
"""

from __future__ import annotations

import torch

_ROWS = 512  # unpacked at a time: what a thread holds beside the result stays in its cache

CENTRE = {4: 8, 8: 128}  # the zero point of a code in a nibble or a byte where none is stored


def rows(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """Put rows together: [N, row_bytes] uint8. codes: [N, B] uint8, bytes or nibbles; scales, zeros: [N, G]."""
    numbers = [torch.empty(one.shape).copy_(one).view(torch.uint8) for one in (scales, zeros) if one is not None]
    used = sum(one.shape[1] for one in (*numbers, codes))
    padding = codes.new_zeros((len(codes), -used % 4))
    return torch.cat([*numbers, codes, padding], 1)


def int8_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of int8 with one scale each: codes [N, K] int8, scales [N, 1] -> [N, row_bytes] uint8."""
    return rows(codes.view(torch.uint8), scales)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] uint8 below 16 -> [N, K / 2], the even column's in the lower four bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def in_width(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] uint8 of `bits` bits, around 2^(bits - 1), as nibbles or bytes, around 8 or 128."""
    width = width_of(bits)
    if bits != width:
        codes = codes + (CENTRE[width] - (1 << bits - 1))
    return nibbles(codes) if width == 4 else codes


def width_of(bits: int) -> int:
    """Bits that a code of so many takes in a row: those of a nibble or a byte."""
    return 4 if bits <= 4 else 8


def from_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes packed without gaps, the first in the lowest bits: words [N, W] int32 -> [N, count] uint8."""
    if bits in (2, 4, 8):
        some = words.contiguous().view(torch.uint8)
        if bits < 8:
            shifts = range(0, 8, bits)
            some = torch.stack([some >> shift & (1 << bits) - 1 for shift in shifts], -1).flatten(-2)
        return some[:, :count]
    first = torch.arange(count) * bits
    word, shift = first // 32, (first % 32).int()
    low = words[:, word] >> shift & ((1 << torch.clamp(32 - shift, max=bits)) - 1)
    over = shift + bits > 32
    rest = (shift[over] + bits - 32).int()
    low[:, over] |= (words[:, word[over] + 1] & (1 << rest) - 1) << bits - rest
    return low.to(torch.uint8)


def codes_from_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """As `from_words`, and then `in_width`; words that are right as they are, only looked at."""
    if bits in (4, 8):
        return words.contiguous().view(torch.uint8)[:, : count * bits // 8]
    parts = [in_width(from_words(some, bits, count), bits) for some in words.split(_ROWS)]
    return torch.cat(parts) if parts else words.new_empty((0, count * width_of(bits) // 8), dtype=torch.uint8)


def words_of(count: int, bits: int) -> int:
    """int32 words that so many codes take."""
    return -(-count * bits // 32)


__all__ = [
    "CENTRE", "codes_from_words", "from_words", "in_width", "int8_rows", "nibbles", "rows", "width_of", "words_of",
]  # fmt: skip
