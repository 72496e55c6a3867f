"""Phi-1, Phi-1.5 (arXiv:2309.05463) and Phi-2, published as PhiForCausalLM.

Rotary positions on a part of each head, biases everywhere (the projection to the vocabulary has one, too), and blocks
whose attention and feed-forward read one norm of the residual stream. Configuration fields that shape the arithmetic:
hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, hidden_act, layer_norm_eps,
qk_layernorm (norms of the heads of queries and keys), max_position_embeddings, tie_word_embeddings, vocab_size, and the
rotary ones, of which partial_rotary_factor is a half by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    LayerNorm,
    Linear,
    MergedLinear,
    PagedAttention,
    RotaryEmbedding,
    RotaryTable,
)
from quire.models.base import CausalLM, refuse
from quire.models.classic import PlainMLP, parallel, run
from quire.models.decoder import head_dim, kv_heads
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PhiForCausalLM(CausalLM):
    checkpoint_ignored = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    supported_fields: ClassVar = ROTARY_FIELDS | {"qk_layernorm"}
    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = PhiModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.num_hidden_layers)
        self.max_model_len = self.model.rotary.max_positions
        self.rope_threshold = self.model.rotary.threshold

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_attention_heads % kv_heads(config):
            refuse(config, "num_key_value_heads", f"it must divide num_attention_heads={config.num_attention_heads}")

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.model.layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.model(embeddings, ctx, kv)


class PhiModel(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PhiLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        x = run(self.layers, residual, self.rotary(ctx), ctx, kv)
        return self.final_layernorm(residual, x)


class PhiLayer(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.self_attn = PhiAttention(config)
        self.mlp = PlainMLP(("fc1", "fc2"), config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        norms = self.input_layernorm, None
        return parallel(residual, x, norms, lambda normed: self.self_attn(normed, rope, ctx, cache), self.mlp)


class PhiAttention(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        spec, hidden = attention_spec(config), config.hidden_size
        size = spec.head_dim
        self.q_proj = Linear(hidden, spec.num_heads * size)
        self.k_proj = Linear(hidden, spec.num_kv_heads * size)
        self.v_proj = Linear(hidden, spec.num_kv_heads * size)
        self.dense = Linear(spec.num_heads * size, hidden)
        self.q_layernorm = LayerNorm(size, config.layer_norm_eps) if config.qk_layernorm else None
        self.k_layernorm = LayerNorm(size, config.layer_norm_eps) if config.qk_layernorm else None
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(spec)

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        if self.q_layernorm is None or self.k_layernorm is None:
            return self.dense(self.attend(self.qkv(x), ctx, cache, rope))
        tokens, size = len(x), self.attend.head_dim  # each by itself: norms take a projection as it lies
        query, key, value = (one(x).view(tokens, -1, size) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self.dense(self.attend.of(self.q_layernorm(query), self.k_layernorm(key), value, ctx, cache, rope))


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    return AttentionSpec(config.num_attention_heads, kv_heads(config), head_dim(config))
