"""OLMo (arXiv:2402.00838): Llama with layer norms that have no parameters, and projections held within a limit.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections; clip_qkv, the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.layers import ROTARY_FIELDS, LayerNorm
from quire.models.decoder import Biases, DecoderAttention, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class OlmoAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.limit = config.clip_qkv

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = self.qkv(x)
        return self.attend.split(qkv if self.limit is None else kernels.clip(qkv, self.limit))


class OlmoForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = OlmoAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "clip_qkv"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, 1e-5, affine=False)
