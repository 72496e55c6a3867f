"""Llama (arXiv:2302.13971) and whatever else is published as LlamaForCausalLM.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, mlp_bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.errors import UnsupportedModelError
from quire.layers import ROTARY_FIELDS
from quire.layers.rotary import rope_parameters
from quire.models.decoder import Biases, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LlamaForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "mlp_bias"}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        rope = rope_parameters(config)
        # "proportional" gives full-width frequencies; transformers' Llama has no other partial rotation.
        if rope["partial_rotary_factor"] != 1.0 and rope["rope_type"] != "proportional":
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor={rope['partial_rotary_factor']} is not "
                f"served with rope_type {rope['rope_type']!r}: transformers' {config.model_type} turns whole heads."
            )

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        attention = getattr(config, "attention_bias", False)
        return Biases(qkv=attention, out=attention, mlp=getattr(config, "mlp_bias", False))
