"""Gemma (arXiv:2403.08295): Llama with norms by (1 + weight), and embeddings times the root of their size.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections. The activation is hidden_act; hidden_activation, which some files have beside it, must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import ROTARY_FIELDS, RMSNorm
from quire.models.base import refuse
from quire.models.decoder import Biases, DecoderForCausalLM, HeadNormAttention, Multipliers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GemmaForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "hidden_activation"}
    _scale_of: torch.dtype | None = None

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        chosen, other = getattr(config, "hidden_act", None), getattr(config, "hidden_activation", None)
        if chosen is not None and other not in (None, chosen):
            refuse(config, "hidden_activation", f"the class that transformers has computes hidden_act={chosen!r}")

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return RMSNorm(size, config.rms_norm_eps, weight_offset=1.0)

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(embedding=config.hidden_size**0.5)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        table = self.model.embed_tokens
        if self._scale_of is not table.dtype:  # in bfloat16, 55.43 is 55.5: so the models were trained
            self._scale_of = table.dtype
            table.scale = float(torch.tensor(self.multiply.embedding, dtype=self._scale_of, device="cpu"))
        return super().embed(input_ids)


class GemmaHeadNormAttention(HeadNormAttention):
    def head_norm(self, config: PretrainedConfig, size: int) -> nn.Module:
        return RMSNorm(size, config.rms_norm_eps, weight_offset=1.0)
