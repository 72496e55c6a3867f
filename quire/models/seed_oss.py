"""Seed-OSS: Llama with a bias of its own for the attention's output.

Configuration fields that shape the arithmetic, beyond Llama's (see `llama.py`): attention_out_bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.models.decoder import Biases
from quire.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SeedOssForCausalLM(LlamaForCausalLM):
    supported_fields: ClassVar = LlamaForCausalLM.supported_fields | {"attention_out_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_out_bias, mlp=config.mlp_bias)
