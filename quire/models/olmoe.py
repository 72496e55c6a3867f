"""OLMoE (arXiv:2409.02060): Llama's blocks with norms of whole queries and keys, and experts in every layer.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections, num_experts, num_experts_per_tok, norm_topk_prob; clip_qkv, within which normed queries and keys, and
values, are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS, RMSNorm
from quire.models.decoder import Biases, DecoderAttention
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class OlmoeAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.q_norm = RMSNorm(spec.num_heads * spec.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_dim, config.rms_norm_eps)
        self.limit = config.clip_qkv

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = super().project(x)
        query, key, value = (part.view(len(x), -1) for part in parts)
        made = self.q_norm(query), self.k_norm(key), value
        if self.limit is not None:
            made = kernels.clip(made[0], self.limit), kernels.clip(made[1], self.limit), kernels.clip(value, self.limit)
        return tuple(one.view(part.shape) for one, part in zip(made, parts, strict=True))


class OlmoeForCausalLM(SparseDecoderForCausalLM):
    attention_class: ClassVar = OlmoeAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "clip_qkv", "norm_topk_prob"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        routing = Routing(renormalise=config.norm_topk_prob)
        return SparseMLP(config, config.num_experts, config.intermediate_size, routing)
