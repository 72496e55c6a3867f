"""A loaded model cut into what one of several processes computes of it; see `layers/shards.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from torch import nn

from quire.checkpoint.matching import Matches
from quire.checkpoint.weights import StoredWeight
from quire.layers import Linear, PagedAttention
from quire.layers.experts import ExpertLinear
from quire.layers.shards import HeadShare, Shard, SharedRows
from quire.models.base import CausalLM


def share_out(model: CausalLM, shard: Shard) -> None:
    """Have a loaded model's layers compute this process's part alone, and its `kv_spec` tell what that keeps."""
    formats: dict[int, SharedRows] = {}
    for module in model.modules():
        if _is_cut(module):
            module.format = formats.setdefault(id(module.format), SharedRows(module.format, shard))
    attentions = {id(one): one for module in model.modules() for one in _attentions_of(module)}.values()
    shares = [HeadShare.of(one.spec, shard) for one in attentions]
    # What every process finds alike: one that shared out alone would wait for the others.
    if None in shares or len({one.spec.num_kv_heads for one in attentions}) != 1:
        return
    for attention, share in zip(attentions, shares, strict=True):
        assert share is not None
        attention.share(share)
        kept = share.kv_end - share.kv_first
    model.kv_spec = replace(model.kv_spec, num_kv_heads=kept)


def rows_read(model: CausalLM, shard: Shard) -> dict[str, tuple[int, int]]:
    """The parameters of which this process needs some rows alone, before they are loaded."""
    return {
        f"{name}.{leaf}": shard.rows_of(module.out_features)
        for name, module in model.named_modules()
        if _is_cut(module)
        for leaf, parameter in module._parameters.items()
        if leaf == "weight" and parameter is not None
    }


def with_rows(matches: Matches, model: CausalLM) -> list[StoredWeight]:
    """What is read, with the rows that are: none, of modules that are elsewhere; all, of what another module takes."""

    def is_elsewhere(name: str) -> bool:
        return name.rpartition(".")[0] in model.elsewhere

    taken = set(matches.shares.values())
    taken_here = {shared for name, shared in matches.shares.items() if not is_elsewhere(name)}

    def rows_of(name: str) -> tuple[int, int] | None:
        if is_elsewhere(name) and name not in taken_here:
            return 0, 0
        return None if name in taken else model.rows_read.get(name)

    return [replace(one, rows=rows_of(one.name)) for one in matches.wanted]


def _is_cut(module: nn.Module) -> TypeGuard[Linear]:
    """A class with a product of its own (`LatentProjection`), or that transformers' code holds, is computed whole."""
    return isinstance(module, ExpertLinear) or (isinstance(module, Linear) and type(module).forward is Linear.forward)


def _attentions_of(module: nn.Module) -> list[PagedAttention]:
    parts = vars(module).values()
    several = [one for part in parts if isinstance(part, (list, tuple)) for one in part]
    return [one for one in (*parts, *several) if isinstance(one, PagedAttention)]
