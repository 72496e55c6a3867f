"""GLM-4.5 and 4.6 (arXiv:2508.06471): GLM's mixtures of experts, with partial rotation in halves.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of query, key
and value; use_qk_norm: a norm over each head of query and key; partial_rotary_factor; first_k_dense_replace: so many
layers have no experts; n_routed_experts, num_experts_per_tok, n_shared_experts, moe_intermediate_size, n_group,
topk_group, norm_topk_prob, routed_scaling_factor. The layers that guess further tokens (num_nextn_predict_layers) are
not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import ROTARY_FIELDS, RMSNorm
from quire.models.decoder import Biases, DecoderAttention
from quire.models.sparse import CorrectedMLP, SparseDecoderForCausalLM, further_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class Glm4MoeAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.has_norms = config.use_qk_norm
        if self.has_norms:
            self.q_norm = RMSNorm(spec.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, config.rms_norm_eps)

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.q_norm(query), self.k_norm(key)) if self.has_norms else (query, key)


class Glm4MoeForCausalLM(SparseDecoderForCausalLM):
    turns_partly: ClassVar = True
    attention_class: ClassVar[type[DecoderAttention]] = Glm4MoeAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "attention_bias", "norm_topk_prob", "routed_scaling_factor", "use_qk_norm",
    }  # fmt: skip

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.checkpoint_ignored = (*self.checkpoint_ignored, *further_layers(config))

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if layer < config.first_k_dense_replace:
            return super().mlp(config, biases, layer)
        shared = config.moe_intermediate_size * config.n_shared_experts
        return CorrectedMLP(config, config.n_routed_experts, shared, biases)
