"""Every kernel in plain torch: the oracle of the native kernels, and what runs where they could not be built.

These too keep promise 1 (a token's result does not depend on what shares its batch): attention goes token by
token, and matrix products go in row tiles of one fixed shape, because a BLAS picks its algorithm by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire.kernels.adapters import LoraSegments, LoraTable, unpack

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}

# B of an adapter lies as the native kernels read it.
ROW_MAJOR_B = False
# Rows of a matrix product's fixed tile. Small, since a single decoded token pays for a whole tile.
_TILE = 8
# Narrower products get columns of zeros: a BLAS computes the rows of a tile differently where it is only 2 or 3 wide.
_LEAST_COLUMNS = 8


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    rows = x.shape[0]
    tiles = F.pad(x, (0, 0, 0, -rows % _TILE)).to(out_dtype or x.dtype).view(-1, _TILE, x.shape[1])
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        weight, bias = weight.to(tiles.dtype), None if bias is None else bias.to(tiles.dtype)
        columns, more = len(weight), max(0, _LEAST_COLUMNS - len(weight))
        if more:
            weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
        y = torch.cat([F.linear(tile, weight, bias) for tile in tiles] or [tiles.new_empty(0, len(weight))])
        parts.append(y[:rows, :columns])
    result = torch.cat(parts, dim=1)
    if segments is not None:
        _add_adapters(x, result, tables, [len(weight) for weight in weights], segments)
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
                hidden = linear(x[start:end], [own.a], [None], torch.float32)
                rows += linear(hidden, [unpack(own.b, width).float()], [None]) * (own.scaling * weight)
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
        for t in range(begin, end):
            seen = length - (end - t) + 1  # causal: the token itself and all before it
            first = max(0, seen - window) if window else 0
            q = query[t].float().view(kv_heads, heads // kv_heads, head_dim)
            scores = (q @ k[:, first:seen].transpose(1, 2)) * scale
            if slopes is not None:
                scores += slopes.view(kv_heads, -1, 1) * (torch.arange(first, seen, device=q.device) - (seen - 1))
            out[t] = (scores.softmax(-1) @ v[:, first:seen]).view(heads, head_dim).to(out.dtype)
    return out


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
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    wide = F.layer_norm(
        x.float(),
        x.shape[-1:],
        None if weight is None else weight.float(),
        None if bias is None else bias.float(),
        eps,
    )
    return wide.to(x.dtype)


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)
    for x in (query, key):
        # Clones: in float32, `.float()` would be a view of what the next line overwrites.
        first, second = x[..., :half].float().clone(), x[..., half : 2 * half].float().clone()
        x[..., :half] = (first * cos - second * sin).to(x.dtype)
        x[..., half : 2 * half] = (second * cos + first * sin).to(x.dtype)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _activated(x.float(), kind).to(x.dtype)


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (_activated(gate, kind) * up).to(x.dtype)


def _activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Row by row: the last bits of torch's vectorised functions depend on where in the call an element stands."""
    return torch.stack([ACTIVATIONS[kind](row) for row in x]) if len(x) else x
