"""Llama (arXiv:2302.13971) and whatever else is published as LlamaForCausalLM.

Pre-norm blocks of grouped-query attention (arXiv:2305.13245) with rotary positions, and a gated feed-forward.
Configuration fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps, attention_bias, mlp_bias,
tie_word_embeddings, vocab_size, max_position_embeddings, and the rotary ones (see `layers/rotary.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    Linear,
    MergedLinear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
    RotaryTable,
    gated_activation,
)
from quire.layers.rotary import rope_parameters
from quire.models.base import CausalLM
from quire.types import ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Biases(NamedTuple):
    """Which of a layer's projections have a bias."""

    qkv: bool
    out: bool
    mlp: bool


class LlamaForCausalLM(CausalLM):
    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "mlp_bias"}
    checkpoint_ignored = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config, self.biases(config))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kv_spec = KVSpec(config.num_hidden_layers, kv_heads(config), head_dim(config))
        self.max_model_len = self.model.rotary.max_positions
        self.rope_threshold = self.model.rotary.threshold

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_attention_heads % kv_heads(config):
            raise UnsupportedModelError(
                f"config.json: num_attention_heads={config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}."
            )
        rope = rope_parameters(config)
        # "proportional" gives full-width frequencies; transformers' Llama has no other partial rotation.
        if rope["partial_rotary_factor"] != 1.0 and rope["rope_type"] != "proportional":
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor={rope['partial_rotary_factor']} is not "
                f"served with rope_type {rope['rope_type']!r}: transformers' {config.model_type} turns whole heads."
            )

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        attention = getattr(config, "attention_bias", False)
        return Biases(qkv=attention, out=attention, mlp=getattr(config, "mlp_bias", False))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.model(embeddings, ctx, kv)


class LlamaModel(nn.Module):
    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, biases) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        rope, x = self.rotary(ctx), None
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer(residual, x, rope, ctx, cache)
        return self.norm(residual, x)


class LlamaLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, biases)
        self.mlp = LlamaMLP(config, biases.mlp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the layer before left to add."""
        x = self.self_attn(self.input_layernorm(residual, x), rope, ctx, cache)
        return self.mlp(self.post_attention_layernorm(residual, x))


class LlamaAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        hidden, heads, size = config.hidden_size, config.num_attention_heads, head_dim(config)
        self.q_proj = Linear(hidden, heads * size, bias=biases.qkv)
        self.k_proj = Linear(hidden, kv_heads(config) * size, bias=biases.qkv)
        self.v_proj = Linear(hidden, kv_heads(config) * size, bias=biases.qkv)
        self.o_proj = Linear(heads * size, hidden, bias=biases.out)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention(heads, kv_heads(config), size)

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        return self.o_proj(self.attend(self.qkv(x), ctx, cache, rope))


class LlamaMLP(nn.Module):
    def __init__(self, config: PretrainedConfig, bias: bool) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)
        self.activate = gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_up(x)))


def head_dim(config: PretrainedConfig) -> int:
    """`head_dim` where the configuration has it; it need not be hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
