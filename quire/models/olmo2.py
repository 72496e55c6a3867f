"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms after attention and feed-forward, and of whole queries and keys.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections; of OLMo 3, sliding_window in the layers that layer_types calls sliding, and rotary parameters by type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from quire.layers import ROTARY_FIELDS, RMSNorm, RotaryEmbedding
from quire.models.decoder import (
    ROTARY_BY_TYPE,
    WINDOW_FIELDS,
    Biases,
    DecoderAttention,
    DecoderForCausalLM,
    PostNormLayer,
    rotaries_by_type,
    type_of_layer,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class Olmo2Attention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.q_norm = RMSNorm(spec.num_heads * spec.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_dim, config.rms_norm_eps)

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = len(query)
        normed = self.q_norm(query.view(tokens, -1)), self.k_norm(key.view(tokens, -1))
        return normed[0].view(query.shape), normed[1].view(key.shape)


class Olmo2ForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = Olmo2Attention
    layer_class: ClassVar = PostNormLayer
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    supported_fields: ClassVar = Olmo2ForCausalLM.supported_fields | WINDOW_FIELDS | ROTARY_BY_TYPE

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return rotaries_by_type(config)

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        return type_of_layer(config, layer)
