"""Qwen3-MoE (arXiv:2505.09388): Qwen3's attention, and experts without one that all tokens share.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections, sliding_window, and those of the experts (see `qwen2_moe.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS
from quire.models.decoder import Biases, HeadNormAttention
from quire.models.qwen2_moe import has_experts
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3MoeForCausalLM(SparseDecoderForCausalLM):
    fewest: ClassVar = 0
    attention_class: ClassVar = HeadNormAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "attention_bias", "norm_topk_prob", "sliding_window", "use_sliding_window",
    }  # fmt: skip

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def renormalises(cls, config: PretrainedConfig) -> bool:
        """Whether the chosen ones' shares are divided by their sum."""
        return bool(config.norm_topk_prob)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if not has_experts(config, layer):
            return super().mlp(config, biases, layer)
        routing = Routing(renormalise=cls.renormalises(config))
        return SparseMLP(config, config.num_experts, config.moe_intermediate_size, routing)
