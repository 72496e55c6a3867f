"""Cohere's Command R and Aya, and Cohere 2 (Command R7B, Command A): one norm for attention and feed-forward, which
stand side by side; rotary pairs that lie side by side.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): layer_norm_eps (norms have no
bias), attention_bias, of all four projections; logit_scale; use_qk_norm (Cohere 1: each head of query and key has a
norm, and a weight of its own); sliding_window (Cohere 2) in the layers that layer_types calls sliding; they alone turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import ROTARY_FIELDS, LayerNorm, RotaryEmbedding
from quire.models.decoder import (
    WINDOW_FIELDS,
    Biases,
    DecoderAttention,
    DecoderForCausalLM,
    Multipliers,
    ParallelLayer,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class CohereAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.has_norms = bool(getattr(config, "use_qk_norm", False))
        if self.has_norms:
            self.q_norm = LayerNorm((spec.num_heads, spec.head_dim), config.layer_norm_eps, bias=False)
            self.k_norm = LayerNorm((spec.num_kv_heads, spec.head_dim), config.layer_norm_eps, bias=False)

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.q_norm(query), self.k_norm(key)) if self.has_norms else (query, key)


class CohereForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = CohereAttention
    layer_class: ClassVar = ParallelLayer
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "logit_scale", "use_qk_norm"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(logits=config.logit_scale)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, config.layer_norm_eps, bias=False)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, interleaved=True),)


class Cohere2ForCausalLM(CohereForCausalLM):
    supported_fields: ClassVar = (
        CohereForCausalLM.supported_fields - {"use_qk_norm"} | WINDOW_FIELDS | {"sliding_window_pattern"}
    )
    fixed_fields: ClassVar = {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0}

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        return 0 if config.layer_types[layer] == "sliding_attention" else -1
