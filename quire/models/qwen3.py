"""Qwen3 (arXiv:2505.09388): Llama with a norm over each head of query and key.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections, and sliding_window in the layers that layer_types calls sliding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.models.decoder import WINDOW_FIELDS, Biases, HeadNormAttention
from quire.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention_class: ClassVar = HeadNormAttention
    supported_fields: ClassVar = (LlamaForCausalLM.supported_fields - {"mlp_bias"}) | WINDOW_FIELDS

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)
