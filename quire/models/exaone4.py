"""Exaone 4 (arXiv:2507.11407): norms after attention and feed-forward, and over each head of query and key.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): sliding_window in the layers
that layer_types calls sliding. Where there is one, these layers alone rotate. Of K-EXAONE's mixtures of experts, whose
norms stand before attention and feed-forward: mlp_layer_types (or first_k_dense_replace): which layers have experts,
num_experts, num_experts_per_tok, num_shared_experts, moe_intermediate_size, n_group, topk_group, norm_topk_prob,
routed_scaling_factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import (
    WINDOW_FIELDS,
    Biases,
    DecoderForCausalLM,
    DecoderLayer,
    HeadNormAttention,
    PostNormLayer,
)
from quire.models.sparse import CorrectedMLP, SparseDecoderForCausalLM, check_mlp_layer_types

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Exaone4ForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = HeadNormAttention
    layer_class: ClassVar[type[DecoderLayer]] = PostNormLayer
    # sliding_window_pattern: transformers makes layer_types of it.
    supported_fields: ClassVar = ROTARY_FIELDS | WINDOW_FIELDS | {"sliding_window_pattern"}

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        rotates = config.sliding_window is None or config.layer_types[layer] == "sliding_attention"
        return 0 if rotates else -1


class ExaoneMoeForCausalLM(Exaone4ForCausalLM, SparseDecoderForCausalLM):
    """K-EXAONE: Exaone 4's mixtures of experts."""

    layer_class: ClassVar = DecoderLayer
    supported_fields: ClassVar = Exaone4ForCausalLM.supported_fields | {
        "mlp_layer_types", "norm_topk_prob", "routed_scaling_factor",
    }  # fmt: skip
    checkpoint_renames = ((r"(.+\.mlp)\.e_score_correction_bias", r"\1.gate.e_score_correction_bias"),)
    checkpoint_ignored = (*Exaone4ForCausalLM.checkpoint_ignored, r"mtp\..+")

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_mlp_layer_types(config)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if config.mlp_layer_types[layer] == "dense":
            return super().mlp(config, biases, layer)
        shared = config.moe_intermediate_size * config.num_shared_experts
        return CorrectedMLP(config, config.num_experts, shared, biases)
