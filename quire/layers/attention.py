"""Causal self-attention over the block pool. It has no parameters: the projections belong to the model."""

from __future__ import annotations

import torch

from quire import kernels
from quire.layers.rotary import RotaryTable
from quire.types import ForwardContext, KVCache


class PagedAttention:
    """Rotate, store and attend.

    num_kv_heads divides num_heads; every key head serves num_heads / num_kv_heads query heads. scale
    multiplies the products of query and key (1 / sqrt(head_dim) by default).
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float | None = None) -> None:
        self.head_dim = head_dim
        self.sections = [num_heads, num_kv_heads, num_kv_heads]
        self.size = num_heads * head_dim
        self.scale = head_dim**-0.5 if scale is None else scale

    def __call__(
        self, qkv: torch.Tensor, ctx: ForwardContext, cache: KVCache, rope: RotaryTable | None = None
    ) -> torch.Tensor:
        """qkv: [T, (num_heads + 2 num_kv_heads) * head_dim] -> [T, num_heads * head_dim]."""
        query, key, value = qkv.view(qkv.shape[0], -1, self.head_dim).split(self.sections, 1)
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

        query and key are rotated in place.
        """
        if rope is not None:
            kernels.rotary(query, key, rope.rows, rope.cos_sin)
        kernels.write_kv(key, value, cache.keys, cache.values, ctx.slot_mapping)
        out = kernels.paged_attention(
            query, cache.keys, cache.values, ctx.block_table, ctx.query_start, ctx.context_len, self.scale
        )
        return out.view(query.shape[0], self.size)
