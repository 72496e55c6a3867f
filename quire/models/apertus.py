"""Apertus (arXiv:2509.14233): Llama with a norm over each head of query and key, and a plain feed-forward of xIELU.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import ROTARY_FIELDS, Linear, activation
from quire.models.decoder import Biases, DecoderForCausalLM, DecoderLayer, HeadNormAttention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ApertusMLP(nn.Module):
    """The activation's numbers are trained, and stand in the files under its name."""

    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ApertusLayer(DecoderLayer):
    norm_names = ("attention_layernorm", "feedforward_layernorm")


class ApertusForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = HeadNormAttention
    mlp_class: ClassVar = ApertusMLP
    layer_class: ClassVar = ApertusLayer
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias"}
    fixed_fields: ClassVar = {"qk_norm": True, "post_norm": False}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)
