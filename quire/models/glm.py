"""GLM-4 in transformers' form (arXiv:2406.12793; GlmForCausalLM) and GLM-4-0414 (Glm4ForCausalLM): fused gate and up,
partial rotation of pairs that lie side by side; the latter with norms around attention and feed-forward.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of query, key
and value; partial_rotary_factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.layers import ROTARY_FIELDS, RotaryEmbedding
from quire.models.decoder import Biases, DecoderForCausalLM, FusedGatedMLP, SandwichLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GlmForCausalLM(DecoderForCausalLM):
    turns_partly: ClassVar = True
    mlp_class: ClassVar = FusedGatedMLP
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, interleaved=True),)


class Glm4Layer(SandwichLayer):
    norm_names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Glm4ForCausalLM(GlmForCausalLM):
    layer_class: ClassVar = Glm4Layer
