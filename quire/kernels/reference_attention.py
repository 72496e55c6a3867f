"""The reference's kernels about attention and its cache (see `reference.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels import exact

# Scores that are computed at a time.
_MOST_SCORES = 1 << 20


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
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    head_scales: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
    chunk: int = 0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    heads, block_size = query.shape[1], keys.shape[2]
    out = query.new_empty((len(query), heads, values.shape[3]))
    starts, lengths = query_start.tolist(), context_len.tolist()
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        places = torch.arange(length - (end - begin), length, device=query.device)
        ends = places + 1 if visible_end is None else visible_end[begin:end].long()
        firsts = (places + 1 - window).clamp_min(0) if window else torch.zeros_like(places)
        if chunk:
            firsts = torch.maximum(firsts, places - places % chunk)
        skipped = int(firsts[0]) // block_size  # blocks before what any token sees
        blocks = block_table[s, skipped : -(-length // block_size)].long()
        # [G, what is not skipped, size]
        k, v = (
            _as_floats(cache[blocks], None if scales is None else scales[blocks])
            .transpose(0, 1)
            .flatten(1, 2)[:, : length - skipped * block_size]
            for cache, scales in ((keys, key_scales), (values, value_scales))
        )
        # A token's weight of what it does not see is 0, and 0 times a number is nothing.
        together = max(1, _MOST_SCORES // (heads * max(length, 1))) if v.isfinite().all() else 1
        for some in torch.arange(end - begin, device=query.device).split(together):
            low, high = int(firsts[some[0]]), int(ends[some[-1]])
            seen, at = torch.arange(low, high, device=query.device), low - skipped * block_size
            key, value = (x[:, at : at + len(seen)] for x in (k, v))
            scores = _scores(query[begin + some], key, scale, head_scales, softcap)
            if slopes is not None:
                scores = scores + slopes.view(-1, 1, 1) * (seen - places[some].unsqueeze(1))
            if biases is not None:
                reach = biases.shape[1] // 2
                scores = scores + biases[:, (seen - places[some].unsqueeze(1)).clamp(-reach, reach) + reach]
            hidden = (seen < firsts[some].unsqueeze(1)) | (seen >= ends[some].unsqueeze(1))
            out[begin + some] = _weigh(scores.masked_fill(hidden, -torch.inf), value, sinks).to(query.dtype)
    return out


def _as_floats(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return rows.float() if scales is None else rows.float() * scales


def _scores(
    query: torch.Tensor, keys: torch.Tensor, scale: float, head_scales: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    """query: [t, H, D]; keys: [G, n, D]; -> [H, t, n]."""
    tokens, heads, head_dim = query.shape
    q = query.transpose(0, 1).reshape(len(keys), -1, head_dim)  # [G, H / G * t, D]
    scores = (exact.products(q, keys) * scale).view(heads, tokens, -1)
    if head_scales is not None:
        scores = scores * head_scales.view(-1, 1, 1)
    if softcap:
        scores = tanh(scores / softcap) * softcap
    return scores


def _weigh(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores [H, t, n], and what it makes of values [G, n, DV]: [t, H, DV] float32. sinks: [H]."""
    heads, tokens, _ = scores.shape
    greatest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        greatest = torch.maximum(greatest, sinks.view(-1, 1, 1))
    shares = exact.exp((scores - greatest).double()).view(len(values), -1, values.shape[1])
    # With a value of ones: what the shares are to be divided by.
    sums = exact.products(shares, F.pad(values, (0, 1), value=1.0).mT).view(heads, tokens, -1)
    total = sums[..., -1:]
    if sinks is not None:
        total = total + exact.exp((sinks.view(-1, 1, 1) - greatest).double())
    return (sums[..., :-1] / total).transpose(0, 1)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    block_size = keys.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    for rows, cache, scales in ((key, keys, key_scales), (value, values, value_scales)):
        if rows is None or cache is None:
            continue
        if scales is not None:
            rows, scales[block, :, offset] = quantized(rows)
        cache[block, :, offset] = rows


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, [T, G, D] int8, and what they are to be multiplied by, [T, G, 1] float32."""
    x = rows.float()
    finite = x.isfinite().all(-1, keepdim=True)
    scales = torch.where(finite, x.abs().amax(-1, keepdim=True) / 127, torch.nan)
    whole = torch.where(scales > 0, x / scales, 0.0).round().clamp(-127, 127)
    return whole.to(torch.int8), scales


def tanh(x: torch.Tensor) -> torch.Tensor:
    e = exact.expm1(x.double().abs().clamp(max=10) * 2).double()
    return (e / (e + 2)).float().copysign(x)
