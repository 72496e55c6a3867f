"""CWM (Meta, 2025): Llama without biases in attention, and with a window in the layers that layer_types calls sliding.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): sliding_window, layer_types,
mlp_bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import WINDOW_FIELDS, Biases, DecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class CwmForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | WINDOW_FIELDS | {"mlp_bias"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(mlp=config.mlp_bias)
