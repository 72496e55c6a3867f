"""Helium (Kyutai, 2025): Llama that rotates pairs which lie side by side.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of query, key
and value; mlp_bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.layers import ROTARY_FIELDS, RotaryEmbedding
from quire.models.decoder import Biases, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class HeliumForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "mlp_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, mlp=config.mlp_bias)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, interleaved=True),)
