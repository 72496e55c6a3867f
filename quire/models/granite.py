"""Granite (arXiv:2408.13359): Llama with multipliers of embeddings, attention, residual stream and scores.

Configuration fields that shape the arithmetic, beyond Llama's (see `llama.py`): embedding_multiplier,
attention_multiplier (the scale of a query's product with a key), residual_multiplier, logits_scaling (a divisor).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch

from quire.models.decoder import Multipliers
from quire.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class GraniteForCausalLM(LlamaForCausalLM):
    supported_fields: ClassVar = LlamaForCausalLM.supported_fields | {
        "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    }  # fmt: skip

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        return dataclasses.replace(super().attention_spec(config, layer), scale=config.attention_multiplier)

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(config.embedding_multiplier, config.residual_multiplier, 1 / config.logits_scaling)

    def embed_given(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens.scaled(rows)
