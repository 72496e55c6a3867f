"""Exaone 4 (arXiv:2507.11407): norms after attention and feed-forward, and over each head of query and key.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): sliding_window in the layers
that layer_types calls sliding. Where there is one, these layers alone rotate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import WINDOW_FIELDS, DecoderForCausalLM, HeadNormAttention, PostNormLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Exaone4ForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = HeadNormAttention
    layer_class: ClassVar = PostNormLayer
    # sliding_window_pattern: transformers makes layer_types of it.
    supported_fields: ClassVar = ROTARY_FIELDS | WINDOW_FIELDS | {"sliding_window_pattern"}

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        rotates = config.sliding_window is None or config.layer_types[layer] == "sliding_attention"
        return 0 if rotates else -1
