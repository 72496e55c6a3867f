"""Qwen2-MoE (arXiv:2407.10671, section 2.2.2): Qwen2's attention, experts, and one that all tokens share.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): num_experts,
num_experts_per_tok, moe_intermediate_size, shared_expert_intermediate_size, norm_topk_prob (the chosen ones' shares are
divided by their sum), decoder_sparse_step and mlp_only_layers (which layers have experts at all), qkv_bias, and
sliding_window in the layers that layer_types calls sliding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS
from quire.models.decoder import WINDOW_FIELDS, Biases
from quire.models.sparse import GatedSharedMLP, SparseDecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def has_experts(config: PretrainedConfig, layer: int) -> bool:
    """Whether a layer of a Qwen has experts, and not a feed-forward."""
    by_step = (layer + 1) % config.decoder_sparse_step == 0
    return layer not in config.mlp_only_layers and config.num_experts > 0 and by_step


class Qwen2MoeForCausalLM(SparseDecoderForCausalLM):
    fewest: ClassVar = 0
    supported_fields: ClassVar = ROTARY_FIELDS | WINDOW_FIELDS | {"norm_topk_prob", "qkv_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.qkv_bias)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if not has_experts(config, layer):
            return super().mlp(config, biases, layer)
        routing = Routing(renormalise=config.norm_topk_prob)
        inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        return GatedSharedMLP(config, config.num_experts, inner, routing, shared, biases)
