"""Gemma 3's text models (arXiv:2503.19786): Gemma 2 with a norm over each head, and a rotation for each type of layer.

Configuration fields that shape the arithmetic, beyond Gemma 2's (see `gemma2.py`): rotary parameters by the types of
layers that layer_types has. (Transformers makes layer_types of sliding_window_pattern, and the rotary parameters of
sliding layers of rope_local_base_freq.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.layers import RotaryEmbedding
from quire.models.decoder import ROTARY_BY_TYPE, rotaries_by_type, type_of_layer
from quire.models.gemma import GemmaHeadNormAttention
from quire.models.gemma2 import Gemma2ForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    attention_class: ClassVar = GemmaHeadNormAttention
    # Transformers has attn_logit_softcapping in the configuration, and no use for it.
    supported_fields: ClassVar = (
        Gemma2ForCausalLM.supported_fields - {"attn_logit_softcapping"} | ROTARY_BY_TYPE | {"sliding_window_pattern"}
    )

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return rotaries_by_type(config)

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        return type_of_layer(config, layer)
