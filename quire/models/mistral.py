"""Mistral (arXiv:2310.06825): Llama without biases, with a window in all layers where sliding_window is set."""

from __future__ import annotations

from typing import ClassVar

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"sliding_window"}
