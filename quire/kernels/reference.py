"""Every kernel in plain torch: the oracle of the native kernels, and what runs where they could not be built.

These too keep promise 1 (a token's result does not depend on what shares its batch): every sum and every function is
one of `exact.py`'s, and all else is done element by element with operations that IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from quire.kernels import exact, packed
from quire.kernels.adapters import LoraSegments, LoraTable, unpack
from quire.kernels.experts import ExpertWeights, expert_segments
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.quantized_experts import QuantizedExpertWeights
from quire.kernels.reference_attention import paged_attention as paged_attention
from quire.kernels.reference_attention import tanh
from quire.kernels.reference_attention import write_kv as write_kv
from quire.kernels.reference_experts import combine as combine
from quire.kernels.reference_experts import route as route
from quire.kernels.reference_experts import sort_by_expert as sort_by_expert
from quire.kernels.reference_quantized import product as quantized_product
from quire.kernels.reference_quantized import quantized_embedding as quantized_embedding
from quire.kernels.reference_states import causal_conv1d as causal_conv1d
from quire.kernels.reference_states import gated_norm as gated_norm
from quire.kernels.reference_states import selective_scan as selective_scan

Weight = TypeVar("Weight", torch.Tensor, QuantizedWeight)

# B of an adapter lies as the native kernels read it.
ROW_MAJOR_B = False


def can_pack(weight: torch.Tensor) -> bool:
    """As `native.can_pack`: plain torch multiplies by rows."""
    return False


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    rows = [packed.unpack(weight) for weight in weights]
    return _side_by_side(x, rows, exact.products, biases, out_dtype, tables, segments)


def quantized_linear(
    x: torch.Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    return _side_by_side(x, weights, quantized_product, biases, out_dtype, tables, segments)


def _side_by_side(
    x: torch.Tensor,
    weights: Sequence[Weight],
    product: Callable[[torch.Tensor, Weight], torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None,
    tables: Sequence[LoraTable | None],
    segments: LoraSegments | None,
) -> torch.Tensor:
    parts = [x.new_zeros((x.shape[0], 0), dtype=torch.float32)]  # there may be no weights
    for weight, bias in zip(weights, biases, strict=True):
        y = product(x, weight)
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


def grouped_linear(
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: ExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    return _by_expert(linear, x, starts, tokens, weights, tables, segments)


def quantized_grouped_linear(
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: QuantizedExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    return _by_expert(quantized_linear, x, starts, tokens, weights, tables, segments)


def _by_expert(
    product: Callable[..., torch.Tensor],
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: ExpertWeights | QuantizedExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]],
    segments: LoraSegments | None,
) -> torch.Tensor:
    y = torch.empty((x.shape[0], weights.out_features), dtype=x.dtype)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        own = None if segments is None else expert_segments(segments, tokens[first:end])
        own_tables = () if segments is None else tables[expert]
        y[first:end] = product(x[first:end], weights.weights[expert], weights.biases[expert], None, own_tables, own)
    return y


def embedding(
    ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    rows = F.embedding(ids, packed.unpack(table))
    if scale != 1.0:
        wide = rows.float() * scale
        return (wide if added is None else wide + added.float()).to(rows.dtype)
    return rows if added is None else rows + added


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    x_scale: float = 1.0,
) -> torch.Tensor:
    x = _added(x, residual, x_scale)
    wide = x.float()
    wide = wide * _inverse_size(wide, eps)
    return (wide if weight is None else wide * _with_offset(weight, weight_offset)).to(x.dtype)


def rms_norm_heads(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    return rms_norm(x, weight, eps, None, weight_offset).contiguous()


def _added(x: torch.Tensor, residual: torch.Tensor | None, x_scale: float) -> torch.Tensor:
    """What is to be normalised: the residual, to which x has been added, if there is one."""
    if residual is None:
        return x
    if x_scale == 1.0:
        return residual.add_(x)
    return residual.copy_(residual.float() + x.float() * x_scale)


def _with_offset(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return weight.float() + offset if offset else weight.float()


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
    weight_offset: float = 0.0,
    x_scale: float = 1.0,
) -> torch.Tensor:
    x = _added(x, residual, x_scale)
    wide = x.float()
    wide = wide - (exact.totals(wide.double()) / x.shape[-1]).unsqueeze(-1)
    wide = wide * _inverse_size(wide, eps)
    if weight is not None:
        wide = wide * _with_offset(weight, weight_offset)
    if bias is not None:
        wide = wide + bias.float()
    return wide.to(x.dtype)


def layer_norm_heads(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    return layer_norm(x, weight, bias, eps, None, weight_offset).contiguous()


def rotary(
    query: torch.Tensor,
    key: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
    first: int = 0,
) -> None:
    size = cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).tensor_split(2, dim=-1)
    for x in (query, key):
        if x is None:
            continue
        turned = x[..., first : first + size]
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.tensor_split(2, dim=-1)
        # Clones: in float32, `.float()` would be a view of what the next line overwrites.
        old_a, old_b = a.float().clone(), b.float().clone()
        a.copy_(old_a * cos - old_b * sin)
        b.copy_(old_b * cos + old_a * sin)


def join_heads(first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
    return first.clone(memory_format=torch.contiguous_format) if second is None else torch.cat((first, second), -1)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    table = logits.numpy()
    best = table.argmax(axis=1)  # which takes NaN for the largest, and the first of equals; torch's promises neither
    finite = np.isfinite(table[np.arange(len(table)), best])
    return torch.from_numpy(np.where(finite, best, -1).astype(np.int64))


def sum_rows(x: torch.Tensor, query_start: torch.Tensor, sums: torch.Tensor) -> None:
    for own, (first, end) in zip(sums, pairwise(query_start.tolist()), strict=True):
        for row in x[first:end]:
            own += row


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _ACTIVATIONS[kind](x.float()).to(x.dtype)


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (_ACTIVATIONS[kind](gate) * up).to(x.dtype)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float, interleaved: bool = False) -> torch.Tensor:
    wide = x.float()
    gate, up = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * _times_logistic(gate, gate.double() * alpha)).to(x.dtype)


def xielu(
    x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    wide, own = x.float(), torch.tensor([_softplus(float(alpha_p)), _softplus(float(alpha_n))])
    positive, negative = own[0].to(x.device), own[1].to(x.device) + beta
    below = exact.expm1(torch.minimum(wide, eps).double()) - wide
    return (torch.where(wide > 0, positive * wide * wide, below * negative) + beta * wide).to(x.dtype)


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x)) if x < 20 else x


def add(x: torch.Tensor, added: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (x.float() + added.float() * scale).to(x.dtype)


def add_to(x: torch.Tensor, added: torch.Tensor, scale: float = 1.0) -> None:
    x.copy_(add(x, added, scale))


def scale(x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    wide = x.float() * factor
    return (tanh(wide / cap) * cap if cap else wide).to(x.dtype)


def multiply_rows(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (x.float() * factors.unsqueeze(1)).to(x.dtype)


def clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.float().clamp(-limit, limit).to(x.dtype)


def _times_logistic(x: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-argument)"""
    return x / (1 + exact.exp(-argument))


def _mish(x: torch.Tensor) -> torch.Tensor:
    e = exact.exp(x.double().clamp(max=20)).double()
    return (x * (e * (e + 2) / (e * (e + 2) + 2))).to(x.dtype)


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
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "sigmoid": lambda x: 1 / (1 + exact.exp(-x.double())),
    "tanh": tanh,
    "mish": _mish,
}
