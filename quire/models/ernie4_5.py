"""Ernie 4.5's dense models: Llama with rotary pairs that lie side by side.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): use_bias, of all projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.layers import ROTARY_FIELDS, RotaryEmbedding
from quire.models.decoder import Biases, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"use_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.use_bias, out=config.use_bias, mlp=config.use_bias)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, interleaved=True),)
