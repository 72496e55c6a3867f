"""The reference's kernels about experts (see `reference.py`), but for the product, which is made of its `linear`."""

from __future__ import annotations

import torch

from quire.kernels import exact
from quire.kernels.experts import Routing


def route(
    logits: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
) -> None:
    chosen = experts.shape[1]
    routing.numbers(logits.shape[1], chosen)
    if routing.scores == "sparse_mixer":
        return _mix_sparsely(logits, experts, weights, routing.tolerance)
    scores = logits
    if routing.scores == "softmax":
        scores = _softmax(logits)
    elif routing.scores == "sigmoid":
        scores = _sigmoid(logits)
    keys = scores if bias is None else scores + bias
    if routing.groups > 1:
        keys = keys.masked_fill(~_in_best_groups(keys, routing), -torch.inf)
    # A stable sort leaves the lower number of equals before the other.
    best = keys.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    own = scores.gather(1, best)
    if routing.scores == "softmax_of_chosen":
        own = _softmax(own)
    elif routing.scores == "sigmoid_of_chosen":
        own = _sigmoid(own)
    if routing.renormalise:
        total = sum(own.unbind(1), torch.zeros(len(own))) + routing.added
        own = own / total.clamp(min=routing.least).unsqueeze(1)
    experts.copy_(best)
    weights.copy_(own * routing.scale)


def _in_best_groups(keys: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, E] bool"""
    grouped = keys.unflatten(1, (routing.groups, -1))
    best = grouped.sort(dim=-1, descending=True, stable=True).values[..., : routing.group_best]
    group_keys = best[..., 0] if best.shape[-1] == 1 else best[..., 0] + best[..., 1]
    top = group_keys.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(group_keys, dtype=torch.bool).scatter_(1, top, True)
    return kept.unsqueeze(-1).expand_as(grouped).flatten(1)


def _mix_sparsely(logits: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, tolerance: float) -> None:
    left, free = logits.clone(), torch.ones_like(logits, dtype=torch.int32)
    for place in range(experts.shape[1]):
        most = left.amax(-1, keepdim=True)
        best = (free + free * (left == most)).argmax(-1, keepdim=True)  # the first of equals
        far = (most - logits) / torch.maximum(logits.abs(), most) > tolerance
        experts[:, place] = best[:, 0]
        weights[:, place] = _softmax(left.masked_fill(far, -torch.inf)).gather(1, best)[:, 0]
        left.scatter_(1, best, -torch.inf)
        free.scatter_(1, best, 0)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    shares = exact.exp((x - x.amax(-1, keepdim=True)).double())
    return shares / exact.totals(shares.double()).unsqueeze(-1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + exact.exp(-x.double()))


def sort_by_expert(experts: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> None:
    flat, count = experts.flatten().long(), len(starts) - 1
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < count:
        raise IndexError("experts: an expert is none of those that there are")
    order = flat.sort(stable=True).indices
    tokens.copy_(order // max(experts.shape[1], 1))
    places.view(-1)[order] = torch.arange(len(flat), dtype=torch.int32)
    starts[0] = 0
    starts[1:] = flat.bincount(minlength=count).cumsum(0)


def combine(
    x: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    total = torch.zeros((len(places), x.shape[1]))
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total = total + x[place.long()].float() * weight.unsqueeze(1)
    if shared is not None:
        total = total + (shared.float() if shared_gate is None else _sigmoid(shared_gate) * shared.float())
    return total.to(x.dtype)
