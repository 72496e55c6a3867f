"""Every kernel in plain torch: the oracle of the native kernels, and what runs where they could not be built.

These too keep promise 1 (a token's result does not depend on what shares its batch): every sum and every function is
one of `exact.py`'s, and all else is done element by element with operations that IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire.kernels import exact
from quire.kernels.adapters import LoraSegments, LoraTable, unpack

# B of an adapter lies as the native kernels read it.
ROW_MAJOR_B = False
# Scores that are computed at a time.
_MOST_SCORES = 1 << 20


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    parts = [x.new_zeros((x.shape[0], 0), dtype=torch.float32)]  # there may be no weights
    for weight, bias in zip(weights, biases, strict=True):
        y = exact.products(x, weight)
        parts.append(y if bias is None else y + bias.float())
    result = torch.cat(parts, dim=1).to(out_dtype or x.dtype)
    if segments is not None:
        _add_adapters(x, result, tables, [len(weight) for weight in weights], segments.for_rows(x.shape[0]))
    return result


def _add_adapters(
    x: torch.Tensor, y: torch.Tensor, tables: Sequence[LoraTable | None], widths: Sequence[int], segments: LoraSegments
) -> None:
    for start, end, slot, weight in segments.rows:
        if start < 0 or end > len(x):
            raise IndexError("segments: a segment is outside the rows of x")
        column = 0
        for table, width in zip(tables, widths, strict=True):
            first, column = column, column + width
            own = None if table is None else table.get(slot)
            if own is None:
                continue
            rows = y[start:end, first:column].float()
            if own.a is not None and own.b is not None:
                hidden = exact.products(x[start:end], own.a)
                rows += exact.products(hidden, unpack(own.b, width)) * (own.scaling * weight)
            if own.scale is not None:
                rows *= own.scale
            if own.shift is not None:
                rows += own.shift
            y[start:end, first:column] = rows.to(y.dtype)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    heads, head_dim = query.shape[1:]
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts, lengths = query_start.tolist(), context_len.tolist()
    for s, length in enumerate(lengths):
        blocks = block_table[s, : -(-length // block_size)].long()
        # [kv_heads, length, head_dim]
        k = keys[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
        v = values[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
        begin, end = starts[s], starts[s + 1]
        # A token's weight of what it does not see is 0, and 0 times a number is nothing.
        together = max(1, _MOST_SCORES // (heads * max(length, 1))) if v.isfinite().all() else 1
        for first in range(begin, end, together):
            last = min(first + together, end)
            places = torch.arange(length - end + first, length - end + last, device=query.device)
            out[first:last] = _attend(query[first:last], k, v, places, scale, window, slopes)
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    scale: float,
    window: int,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Tokens of one sequence, [t, H, D], at its positions `places` [t], ascending; keys, values: [G, length, D]."""
    tokens, heads, head_dim = query.shape
    begin, end = max(0, int(places[0]) - window + 1) if window else 0, int(places[-1]) + 1
    seen = torch.arange(begin, end, device=query.device)
    distance = seen - places.unsqueeze(1)  # [t, keys]
    q = query.transpose(0, 1).reshape(len(keys), -1, head_dim)  # [G, H / G * t, D]
    scores = (exact.products(q, keys[:, begin:end]) * scale).view(heads, tokens, -1)
    if slopes is not None:
        scores = scores + slopes.view(-1, 1, 1) * distance
    hidden = (distance > 0) | (distance <= -window) if window else distance > 0
    scores = scores.masked_fill(hidden, -torch.inf)
    shares = exact.exp((scores - scores.amax(-1, keepdim=True)).double()).view(len(keys), -1, len(seen))
    # With a value of ones: what the shares are to be divided by.
    sums = exact.products(shares, F.pad(values[:, begin:end], (0, 1), value=1.0).mT)
    return (sums[..., :-1] / sums[..., -1:]).view(heads, tokens, head_dim).transpose(0, 1)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    block_size = keys.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    keys[block, :, offset] = key
    values[block, :, offset] = value


def embedding(ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    rows = F.embedding(ids, table)
    return rows if added is None else rows + added


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    return (wide * _inverse_size(wide, eps) * weight.float()).to(x.dtype)


def _inverse_size(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(the mean of each row's squares + eps), [T, 1] float32."""
    wide = x.double()
    return exact.rsqrt(exact.totals(wide * wide).double() / x.shape[-1] + eps).unsqueeze(-1)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    wide = wide - (exact.totals(wide.double()) / x.shape[-1]).unsqueeze(-1)
    wide = wide * _inverse_size(wide, eps)
    if weight is not None:
        wide = wide * weight.float()
    if bias is not None:
        wide = wide + bias.float()
    return wide.to(x.dtype)


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).tensor_split(2, dim=-1)
    for x in (query, key):
        # Clones: in float32, `.float()` would be a view of what the next line overwrites.
        first, second = x[..., :half].float().clone(), x[..., half : 2 * half].float().clone()
        x[..., :half] = (first * cos - second * sin).to(x.dtype)
        x[..., half : 2 * half] = (second * cos + first * sin).to(x.dtype)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _ACTIVATIONS[kind](x.float()).to(x.dtype)


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (_ACTIVATIONS[kind](gate) * up).to(x.dtype)


def _times_logistic(x: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-argument)"""
    return x / (1 + exact.exp(-argument))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * exact.erfc(x.double() * -(0.5**0.5))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    # (1 + tanh(z)) / 2 = 1 / (1 + e^-2z)
    return _times_logistic(x, (wide + wide * wide * wide * 0.044715) * (8 / math.pi) ** 0.5)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: _times_logistic(x, x.double()),
    "relu": F.relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: _times_logistic(x, x.double() * 1.702),
}
