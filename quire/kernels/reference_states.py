"""The reference's kernels about layers with states (see `reference.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from quire.kernels import exact


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    tails: torch.Tensor,
    tail_ends: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    wide, taps = weight.float(), weight.shape[1]
    if scales is not None:
        wide = wide * scales.unsqueeze(1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for first, end, runs, before in _sequences(tail_ends, block_table, query_start, context_len, block_size):
        tail = x.new_zeros((taps - 1, x.shape[1])) if before is None else tails[before]
        inputs = torch.cat([tail, x[first:end]])
        terms = [inputs[k : k + end - first].double() * wide[:, k].double() for k in range(taps)]
        terms += [] if bias is None else [bias.double().expand_as(terms[0])]
        y[first:end] = _silu(exact.totals(torch.stack(terms, -1)))
        for last, target in runs:
            tails[target] = inputs[last - first : last - first + taps - 1].clone()
    _mark(tail_ends, block_table, query_start, context_len, block_size)
    return y


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    state_ends: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    block_size: int,
    groups: int,
    dt_scale: float,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    heads, size, width = states.shape[2:]
    inner, rate = heads * width, -exact.exp(a_log.double())
    steps = torch.tensor([_softplus(value) for value in (dt.float() * dt_scale + dt_bias.float()).flatten().tolist()])
    steps = steps.view(dt.shape).clamp(dt_min, dt_max)
    y = torch.empty((len(x), inner), dtype=x.dtype)
    for first, end, runs, before in _sequences(state_ends, block_table, query_start, context_len, block_size):
        state = torch.zeros((heads, size, width)) if before is None else states[before]
        left = dict(runs)
        for t in range(first, end):
            own = x[t, :inner].float().view(heads, 1, width)
            b, c = (
                part.float().view(groups, 1, size).expand(groups, heads // groups, size).reshape(heads, size, 1)
                for part in x[t, inner:].chunk(2)
            )
            step = steps[t].view(heads, 1, 1)
            decay = exact.exp((step * rate.view(heads, 1, 1)).double())
            state = state * decay + b * (step * own)
            sums = exact.totals((state.double() * c.double()).transpose(1, 2))
            y[t] = (sums + d.float().unsqueeze(1) * own[:, 0]).flatten()
            if t + 1 in left:
                states[left[t + 1]] = state
    _mark(state_ends, block_table, query_start, context_len, block_size)
    return y


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    groups: int = 1,
    eps: float = 0.0,
    gate_scale: float = 1.0,
    norm_first: bool = False,
) -> torch.Tensor:
    factor, row = _silu(gate.float() * gate_scale), x.float()
    if weight is None:
        return (row * factor).to(x.dtype)
    if not norm_first:
        row = row * factor
    parts = row.unflatten(1, (groups, -1))
    squares = exact.totals(parts.double() ** 2) / parts.shape[-1]
    parts = parts * exact.rsqrt(squares.double() + eps).unsqueeze(-1)
    row = weight.float() * parts.flatten(1)
    return (row * factor if norm_first else row).to(x.dtype)


_Place = tuple[int, int]  # a block, and which of its two states


def _sequences(
    ends: torch.Tensor, table: torch.Tensor, query_start: torch.Tensor, context_len: torch.Tensor, block_size: int
) -> Iterator[tuple[int, int, list[tuple[int, _Place]], _Place | None]]:
    """(first row, end, (row, where the state behind the rows before it goes) in order, the state in front) of each
    sequence that has tokens in the step."""
    starts = query_start.tolist()
    for s, (first, end) in enumerate(pairwise(starts)):
        if first == end:
            continue
        last = int(context_len[s])
        position = last - (end - first)
        before = None
        if position:
            block = int(table[s, (position - 1) // block_size])
            found = [slot for slot in range(2) if block >= 0 and int(ends[block, slot]) == position]
            if not found:
                raise ValueError("block_table: no state is there that stands in front of a sequence's first token")
            before = block, found[-1]
        runs = []
        for place in range(position // block_size, (last - 1) // block_size + 1):
            block = int(table[s, place])
            if block >= len(ends):
                raise IndexError("block_table: a block is none of those that there are")
            if block >= 0:
                slot = 1 - before[1] if before is not None and before[0] == block else 0
                runs.append((first + min((place + 1) * block_size, last) - position, (block, slot)))
        if not runs or runs[-1][0] != end:
            raise IndexError("block_table: there is no block for the state behind a sequence's last token")
        yield first, end, runs, before


def _mark(
    ends: torch.Tensor, table: torch.Tensor, query_start: torch.Tensor, context_len: torch.Tensor, block_size: int
) -> None:
    """Say what was written, once all of it is."""
    found = list(_sequences(ends, table, query_start, context_len, block_size))
    lengths = [last for last, count in zip(context_len.tolist(), query_start.diff().tolist(), strict=True) if count]
    for (_, end, runs, before), last in zip(found, lengths, strict=True):
        for row, (block, slot) in runs:
            ends[block, slot] = last - end + row
            if before != (block, 1 - slot):
                ends[block, 1 - slot] = -1


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 / (1 + exact.exp(-x.double())))


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x)) if x <= 20 else x
