"""MPT (MosaicML, 2023): ALiBi (arXiv:2108.12409) instead of positions, no biases, not even in the norms.

Configuration fields that shape the arithmetic: d_model, n_layers, n_heads, max_seq_len, layer_norm_epsilon, vocab_size,
tie_word_embeddings, and of attn_config: softmax_scale, clip_qkv and alibi_bias_max. Models without ALiBi, with norms of
queries and keys, with one key for all heads or with another width of the feed-forward are refused: transformers' class
takes none of them. learned_pos_emb has no effect on a model with ALiBi.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.layers import Embedding, LayerNorm, Linear
from quire.models.base import CausalLM, refuse
from quire.models.classic import FusedAttention, PlainMLP, run, sequential
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What transformers' class does whatever the configuration says: other values are refused.
_ONLY: Mapping[str, tuple[Any, ...]] = {"expansion_ratio": (4,), "logit_scale": (None,), "no_bias": (True,)}
_ONLY_IN_ATTENTION: Mapping[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "prefix_lm": (False, None),
    "qk_ln": (False, None),
    "attn_uses_sequence_id": (False, None),
}


class MptForCausalLM(CausalLM):
    # Checkpoints saved from the bare model have no prefix.
    checkpoint_renames = ((r"((?:wte|blocks|norm_f)\..+)", r"transformer.\1"),)
    supported_fields: ClassVar = frozenset({"attn_config", "no_bias", "norm_type"})
    tied_weights: Mapping[str, str] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = MptModel(config)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.n_layers)
        self.max_model_len = config.max_seq_len

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.d_model % config.n_heads:
            refuse(config, "n_heads", f"it must divide d_model={config.d_model}")
        for field, served in _ONLY.items():
            if getattr(config, field, served[0]) not in served:
                refuse(config, field, f"served only with {' or '.join(map(repr, served))}")
        for field, served in _ONLY_IN_ATTENTION.items():
            value = getattr(config.attn_config, field, served[0])
            if value not in served:
                refuse(config, f"attn_config.{field}", f"served only with {' or '.join(map(repr, served))}", value)

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.transformer.blocks

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.wte(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer(embeddings, ctx, kv)


class MptModel(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(MptBlock(config) for _ in range(config.n_layers))
        self.norm_f = LayerNorm(config.d_model, config.layer_norm_epsilon, bias=False)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.norm_f(residual, run(self.blocks, residual, None, ctx, kv))


class MptBlock(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, eps = config.d_model, config.layer_norm_epsilon
        self.norm_1 = LayerNorm(hidden, eps, bias=False)
        self.attn = MptAttention(config)
        self.norm_2 = LayerNorm(hidden, eps, bias=False)
        self.ffn = PlainMLP(("up_proj", "down_proj"), hidden, 4 * hidden, "gelu", bias=False)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, rope: None, ctx: ForwardContext, cache: KVCache
    ) -> torch.Tensor:
        norms = self.norm_1, self.norm_2
        return sequential(residual, x, norms, lambda normed: self.attn(normed, rope, ctx, cache), self.ffn)


class MptAttention(FusedAttention):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(attention_spec(config), config.d_model, ("Wqkv", "out_proj"), (False, False))
        self.limit = config.attn_config.clip_qkv

    def adjust(self, qkv: torch.Tensor) -> torch.Tensor:
        return kernels.clip(qkv, self.limit) if self.limit else qkv


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    heads, attention = config.n_heads, config.attn_config
    slopes = alibi_slopes(heads, attention.alibi_bias_max)
    return AttentionSpec(heads, heads, config.d_model // heads, attention.softmax_scale, alibi_slopes=slopes)


def alibi_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """One slope a head, down to 2 ** -largest; of heads that are no power of two, every other one of the next power
    comes first."""
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(number * largest / whole) for number in range(1, whole + 1)]
    return tuple(slopes if whole == heads else [*slopes[1::2], *slopes[::2]][:heads])
