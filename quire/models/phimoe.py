"""Phi-3.5-MoE (arXiv:2404.14219): Llama's attention, layer norms, and two experts chosen one after the other.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): num_local_experts,
router_jitter_noise (how near to the best an expert's logit must be to share in its softmax), attention_bias, of all
four projections, lm_head_bias, sliding_window; short_mscale and long_mscale among the rotary parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS, LayerNorm, Linear
from quire.models.base import refuse
from quire.models.decoder import Biases
from quire.models.mixtral import MIXTRAL_NAMES, MIXTRAL_RENAMES
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PhimoeForCausalLM(SparseDecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "attention_bias", "lm_head_bias", "sliding_window", "rope_parameters.short_mscale",
        "rope_parameters.long_mscale",
    }  # fmt: skip
    checkpoint_renames = MIXTRAL_RENAMES
    old_names = MIXTRAL_NAMES
    new_names = ((r"\.mlp\.gate\b", ".mlp.router"),)

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        if self.rope_threshold is not None:
            # Beyond it transformers' class keeps to the short frequencies, where the published one takes the long ones.
            self.max_model_len = min(self.max_model_len, self.rope_threshold)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_experts_per_tok != 2:
            refuse(config, "num_experts_per_tok", "the sparse mixer chooses two")

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, config.rms_norm_eps)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        routing = Routing("sparse_mixer", tolerance=2 * config.router_jitter_noise)
        return SparseMLP(config, config.num_local_experts, config.intermediate_size, routing)
