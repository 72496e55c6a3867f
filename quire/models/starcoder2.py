"""Starcoder2 (arXiv:2402.19173): layer norms with bias, a plain feed-forward, and windows.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): use_bias, of all projections;
norm_epsilon; sliding_window, of all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import ROTARY_FIELDS, LayerNorm, Linear, activation
from quire.models.decoder import Biases, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Starcoder2MLP(nn.Module):
    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.intermediate_size, bias=biases.mlp)
        self.c_proj = Linear(config.intermediate_size, config.hidden_size, bias=biases.mlp)
        self.activate = activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.activate(self.c_fc(x)))


class Starcoder2ForCausalLM(DecoderForCausalLM):
    mlp_class: ClassVar = Starcoder2MLP
    supported_fields: ClassVar = ROTARY_FIELDS | {"use_bias", "norm_epsilon", "sliding_window"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.use_bias, out=config.use_bias, mlp=config.use_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, config.norm_epsilon)
