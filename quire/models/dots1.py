"""dots.llm1 (arXiv:2506.05767): Qwen3's attention, and experts that are chosen with a correction.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections; sliding_window in the layers that layer_types calls sliding; first_k_dense_replace: so many layers have no
experts; n_routed_experts, num_experts_per_tok, n_shared_experts, moe_intermediate_size, n_group, topk_group,
norm_topk_prob, routed_scaling_factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import WINDOW_FIELDS, Biases, HeadNormAttention
from quire.models.sparse import CorrectedMLP, SparseDecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Dots1ForCausalLM(SparseDecoderForCausalLM):
    attention_class: ClassVar = HeadNormAttention
    supported_fields: ClassVar = (
        ROTARY_FIELDS | WINDOW_FIELDS | {"attention_bias", "norm_topk_prob", "routed_scaling_factor"}
    )

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if layer < config.first_k_dense_replace:
            return super().mlp(config, biases, layer)
        shared = config.moe_intermediate_size * config.n_shared_experts
        return CorrectedMLP(config, config.n_routed_experts, shared, biases)
