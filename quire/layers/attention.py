"""Causal self-attention over the KV pool. It has no parameters: the projections belong to the model.

A layer's attention is five steps: *project* and, where a family has them, *norms of heads*, which are the model's;
then *rotate*, *store* and *attend*, which are these. A model calls `PagedAttention` for a merged projection, `of` for
query, key and value that it has made itself, or the three steps one by one.
"""

from __future__ import annotations

import dataclasses

import torch

from quire import kernels
from quire.layers.rotary import RotaryTable
from quire.types import AttentionSpec, ForwardContext, KVCache


class PagedAttention:
    """Rotate, store and attend, as a spec says; the arguments are the fields of `AttentionSpec`.

    spec: what it computes. scale: what a query's product with a key is multiplied by.
    Raises ValueError for a spec that makes no sense. What the device's kernel does not compute is refused when the
    model is loaded.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        window: int = 0,
        alibi_slopes: tuple[float, ...] = (),
    ) -> None:
        self.spec = AttentionSpec(num_heads, num_kv_heads, head_dim, scale, window, alibi_slopes)
        self.head_dim = head_dim
        self.sections = [num_heads, num_kv_heads, num_kv_heads]
        self.size = num_heads * head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self._slopes: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def from_spec(cls, spec: AttentionSpec) -> PagedAttention:
        return cls(*(getattr(spec, field.name) for field in dataclasses.fields(spec)))

    def __call__(
        self, qkv: torch.Tensor, ctx: ForwardContext, cache: KVCache, rope: RotaryTable | None = None
    ) -> torch.Tensor:
        """qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], all queries, then all keys, then all values
        -> [T, num_heads * head_dim]."""
        query, key, value = self.split(qkv)
        return self.of(query, key, value, ctx, cache, rope)

    def of(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ctx: ForwardContext,
        cache: KVCache,
        rope: RotaryTable | None = None,
    ) -> torch.Tensor:
        """query: [T, num_heads, head_dim]; key, value: [T, num_kv_heads, head_dim] -> [T, num_heads * head_dim].

        A token's heads lie one behind the other; tokens may be strided. query and key are rotated in place.
        """
        if rope is not None:
            self.rotate(query, key, rope)
        self.store(key, value, ctx, cache)
        return self.attend(query, ctx, cache)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of query, key and value, each [T, its heads, head_dim], of qkv as `__call__` takes it."""
        return qkv.view(qkv.shape[0], -1, self.head_dim).split(self.sections, 1)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, rope: RotaryTable) -> None:
        """Turn query and key by their positions, in place."""
        kernels.rotary(query, key, rope.rows, rope.cos_sin, rope.interleaved, rope.first)

    def store(self, key: torch.Tensor, value: torch.Tensor, ctx: ForwardContext, cache: KVCache) -> None:
        """Write key and value, [T, num_kv_heads, head_dim], to the pool."""
        kernels.write_kv(key, value, cache.keys, cache.values, ctx.slot_mapping)

    def attend(self, query: torch.Tensor, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """query: [T, num_heads, head_dim] -> [T, num_heads * head_dim]. The step's own keys and values are stored."""
        spec = self.spec
        slopes = self._slopes_on(query.device) if spec.alibi_slopes else None
        out = kernels.paged_attention(
            query, cache.keys, cache.values, ctx.block_table, ctx.query_start, ctx.context_len, self.scale, spec.window,
            slopes,
        )  # fmt: skip
        return out.view(query.shape[0], self.size)

    def _slopes_on(self, device: torch.device) -> torch.Tensor:
        """[num_heads] float32. Recorded steps know them by their address: they stay."""
        slopes = self._slopes.get(device)
        if slopes is None:
            slopes = self._slopes[device] = torch.tensor(self.spec.alibi_slopes, dtype=torch.float32, device=device)
        return slopes
