"""HunYuan's dense models: Llama with a norm over each head of query and key, after they are rotated.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections; alpha, among the rotary parameters of type "dynamic": a larger base, the same for all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from quire.layers import ROTARY_FIELDS, RMSNorm, RotaryEmbedding, RotaryTable
from quire.layers.rotary import rope_parameters
from quire.models.base import refuse
from quire.models.decoder import Biases, DecoderAttention, DecoderForCausalLM, head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec, ForwardContext, KVCache


class HunYuanAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.query_layernorm = RMSNorm(spec.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(spec.head_dim, config.rms_norm_eps)

    def mix(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        query, key, value = self.project(x)
        assert rope is not None
        self.attend.rotate(query, key, rope)
        query, key = self.query_layernorm(query), self.key_layernorm(key)
        return self.attend.of(query, key, value, ctx, cache)


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = HunYuanAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "attention_head_dim", "rope_parameters.alpha"}
    fixed_fields: ClassVar = {"use_qk_norm": True, "use_rotary_pos_emb": True}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if getattr(config, "attention_head_dim", None) not in (None, head_dim(config)):
            refuse(config, "attention_head_dim", f"it must be head_dim, {head_dim(config)}")

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        rope, size = rope_parameters(config), head_dim(config)
        if rope["rope_type"] != "dynamic" or not rope.get("alpha"):
            return (RotaryEmbedding(config),)
        theta = rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))
        return (RotaryEmbedding(config, parameters={"rope_type": "default", "rope_theta": theta}),)
