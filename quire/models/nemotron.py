"""Nemotron (arXiv:2402.16819, arXiv:2407.14679): layer norms by (1 + weight), partial rotation, relu squared.

Configuration fields that shape the arithmetic, beyond Llama's (see `llama.py`): norm_eps instead of rms_norm_eps,
partial_rotary_factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.layers import ROTARY_FIELDS, LayerNorm
from quire.models.decoder import Biases, DecoderForCausalLM, PlainMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class NemotronForCausalLM(DecoderForCausalLM):
    turns_partly: ClassVar = True
    mlp_class: ClassVar = PlainMLP
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "mlp_bias", "norm_eps"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias, mlp=config.mlp_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, config.norm_eps, weight_offset=1.0)
