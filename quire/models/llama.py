"""Llama (arXiv:2302.13971) and whatever else is published as LlamaForCausalLM.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, mlp_bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import Biases, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LlamaForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "mlp_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        attention = getattr(config, "attention_bias", False)
        return Biases(qkv=attention, out=attention, mlp=getattr(config, "mlp_bias", False))
