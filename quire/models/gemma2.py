"""Gemma 2 (arXiv:2408.00118): Gemma with norms around attention and feed-forward, windows in every other layer, and
soft caps; and VaultGemma (arXiv:2510.15001), which has norms before attention and feed-forward alone.

Configuration fields that shape the arithmetic, beyond Gemma's (see `gemma.py`): query_pre_attn_scalar, by whose root a
query's product with a key is divided; attn_logit_softcapping and final_logit_softcapping; sliding_window in the layers
that layer_types calls sliding.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from quire.models.decoder import WINDOW_FIELDS, DecoderLayer, Multipliers, SandwichLayer
from quire.models.gemma import GemmaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class Gemma2ForCausalLM(GemmaForCausalLM):
    layer_class: ClassVar[type[DecoderLayer]] = SandwichLayer
    supported_fields: ClassVar = (
        GemmaForCausalLM.supported_fields
        | WINDOW_FIELDS
        | {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    )

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        return dataclasses.replace(
            super().attention_spec(config, layer),
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping or 0.0,
        )

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(embedding=config.hidden_size**0.5, softcap=config.final_logit_softcapping or 0.0)


class VaultGemmaLayer(DecoderLayer):
    norm_names = ("input_layernorm", "pre_feedforward_layernorm")


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """VaultGemma (arXiv:2510.15001)."""

    layer_class: ClassVar = VaultGemmaLayer
