"""Layers of towers whose patches are rows, each of which sees its segment: Qwen's and GLM's (arXiv:2409.12191).

Around them, the towers stay transformers' own: positions, windows, mergers. A layer of theirs is taken apart, and what
it is made of put together again on quire's kernels, under the same names: two norms, one product for query, key and
value, attention by segments, and a feed-forward with a gate or without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from quire import kernels
from quire.layers import Linear, Segments
from quire.models.vision.tower_parts import PatchProduct, feed_forward, own_norm


def use_segment_layers(tower: Any, hidden_act: str) -> None:
    """Have a tower's `blocks`, its patch embedding and its mergers' norms computed by quire's kernels.

    hidden_act: of the layers' feed-forwards. Raises UnsupportedModelError for a layer that has other parts than known.
    """
    layouts = _Layouts()
    for number, block in enumerate(tower.blocks):
        tower.blocks[number] = SegmentLayer(block, hidden_act, layouts)
    tower.patch_embed.proj = PatchProduct(tower.patch_embed.proj)
    for merger in (tower.merger, *getattr(tower, "deepstack_merger_list", ())):
        for name in ("ln_q", "norm"):
            if hasattr(merger, name):
                setattr(merger, name, own_norm(getattr(merger, name)))


class SegmentLayer(nn.Module):
    """norm1, attn, norm2 and mlp of one layer, called as transformers calls it."""

    def __init__(self, block: Any, hidden_act: str, layouts: _Layouts) -> None:
        super().__init__()
        self.norm1 = own_norm(block.norm1)
        self.norm2 = own_norm(block.norm2)
        self.attn = _Attention(block.attn)
        self.mlp = feed_forward(block.mlp, hidden_act)
        self._layouts = layouts

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states: [T, C], which the layer writes to. cu_seqlens: [S + 1], where segments begin.
        position_embeddings: (cos, sin), each [T, D] with two equal halves."""
        segments, turns = self._layouts.segments(cu_seqlens), self._layouts.turns(*position_embeddings)
        x = hidden_states.contiguous()
        y = self.norm2(x, self.attn(self.norm1(x), segments, turns))
        kernels.add_to(x, self.mlp(y))
        return x


class _Attention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads: int = attention.num_heads
        self.qkv: Linear = attention.qkv
        self.proj: Linear = attention.proj
        self.scale = (self.qkv.in_features // self.heads) ** -0.5

    def forward(self, x: torch.Tensor, segments: Segments, turns: Turns) -> torch.Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        kernels.rotary(query, key, *turns)
        return self.proj(segments.attend(query, key, value, self.scale).view(len(x), -1))


Turns = tuple[torch.Tensor, torch.Tensor]  # of `kernels.rotary`: positions, and cosines beside sines


class _Layouts:
    """What the layers of an encoding have in common, made by the first of them that asks, and gone with the tensors
    that it was made of."""

    def __init__(self) -> None:
        self._segments: Any = WeakIdKeyDictionary()
        self._turns: Any = WeakIdKeyDictionary()

    def segments(self, starts: torch.Tensor) -> Segments:
        found = self._segments.get(starts)
        if found is None:
            found = self._segments[starts] = Segments(starts)
        return found

    def turns(self, cos: torch.Tensor, sin: torch.Tensor) -> Turns:
        found = self._turns.get(cos)
        if found is None:
            half = cos.shape[-1] // 2
            table = torch.cat((cos[:, :half], sin[:, :half]), dim=-1).float()
            found = self._turns[cos] = torch.arange(len(cos), device=cos.device), table
        return found
