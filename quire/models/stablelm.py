"""StableLM (arXiv:2402.17834): Llama with layer norms, partial rotation and, in some, a parallel residual.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): layer_norm_eps, use_qkv_bias;
qk_layernorm: each head of query and key has a norm of its own; use_parallel_residual: attention and feed-forward read
the same norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.layers import ROTARY_FIELDS, LayerNorm
from quire.models.decoder import (
    Biases,
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    ParallelLayer,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class StableLmAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            eps = config.layer_norm_eps
            self.q_layernorm = LayerNorm((spec.num_heads, spec.head_dim), eps, bias=False)
            self.k_layernorm = LayerNorm((spec.num_kv_heads, spec.head_dim), eps, bias=False)

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.q_layernorm(query), self.k_layernorm(key)) if self.has_norms else (query, key)


class StableLmForCausalLM(DecoderForCausalLM):
    turns_partly: ClassVar = True
    attention_class: ClassVar = StableLmAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {"use_qkv_bias", "qk_layernorm", "use_parallel_residual"}

    @classmethod
    def layer(cls, config: PretrainedConfig, layer: int) -> DecoderLayer:
        return (ParallelLayer if config.use_parallel_residual else DecoderLayer)(config, cls, layer)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.use_qkv_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, config.layer_norm_eps)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        """The files have a tensor for each head's norm."""
        parts = {}
        for layer in range(self.config.num_hidden_layers if self.config.qk_layernorm else 0):
            spec = self.attention_spec(self.config, layer)
            for leaf, heads in (("q_layernorm", spec.num_heads), ("k_layernorm", spec.num_kv_heads)):
                own = f"model.layers.{layer}.self_attn.{leaf}"
                stored = {f"{own}.norms.{head}.weight": torch.Size((spec.head_dim,)) for head in range(heads)}
                parts[f"{own}.weight"] = StoredPart(stored, lambda *heads: torch.stack(heads))
        return parts
