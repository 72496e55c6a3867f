"""Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with their position, past the length of first training.

Configuration fields that shape the arithmetic, beyond Mistral's (see `mistral.py`): of rope_parameters,
llama_4_scaling_beta and original_max_position_embeddings. A query at position p, rotated, is multiplied by
1 + beta * log(1 + floor(p / original)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from quire import kernels
from quire.layers import PositionFactors, RotaryTable
from quire.layers.rotary import rope_parameters
from quire.models.base import is_factor, refuse
from quire.models.decoder import DecoderAttention
from quire.models.mistral import MistralForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import ForwardContext, KVCache


class Ministral3Attention(DecoderAttention):
    factors: PositionFactors

    def mix(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        query, key, value = self.project(x)
        assert rope is not None
        self.attend.rotate(query, key, rope)
        query = kernels.multiply_rows(query.view(len(x), -1), self.factors(ctx)).view(query.shape)
        return self.attend.of(query, key, value, ctx, cache)


class Ministral3ForCausalLM(MistralForCausalLM):
    attention_class: ClassVar = Ministral3Attention
    # The files say the length of the context there, too, where transformers does not look.
    supported_fields: ClassVar = MistralForCausalLM.supported_fields | {
        "rope_parameters.llama_4_scaling_beta", "rope_parameters.max_position_embeddings",
    }  # fmt: skip

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        rope = rope_parameters(config)
        length, strength = rope["original_max_position_embeddings"], rope["llama_4_scaling_beta"]
        factors = PositionFactors(length, strength, 0, self.max_model_len)
        for module in self.modules():
            if isinstance(module, Ministral3Attention):
                module.factors = factors

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        rope = rope_parameters(config)
        strength, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        if not is_factor(strength):
            refuse(config, "rope_parameters.llama_4_scaling_beta", "it must be a number", strength)
        if type(length) is not int or length < 1:
            reason = "it must be a whole number above 0"
            refuse(config, "rope_parameters.original_max_position_embeddings", reason, length)
