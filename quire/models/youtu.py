"""Youtu-LLM: DeepSeek V3's attention with one feed-forward a layer."""

from __future__ import annotations

from typing import ClassVar

from quire.models.latent import LatentDecoderForCausalLM


class YoutuForCausalLM(LatentDecoderForCausalLM):
    supported_fields: ClassVar = LatentDecoderForCausalLM.supported_fields | {"rope_interleave"}
