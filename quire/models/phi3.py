"""Phi-3, Phi-3.5 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): Llama with fused projections.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): sliding_window, of all layers;
original_max_position_embeddings, and with it "longrope", whose frequencies depend on the prompt's length.
"""

from __future__ import annotations

from typing import ClassVar

from quire.layers import ROTARY_FIELDS
from quire.models.decoder import DecoderForCausalLM, FusedAttention, FusedGatedMLP


class Phi3ForCausalLM(DecoderForCausalLM):
    turns_partly: ClassVar = True
    attention_class: ClassVar = FusedAttention
    mlp_class: ClassVar = FusedGatedMLP
    supported_fields: ClassVar = ROTARY_FIELDS | {"sliding_window"}
    fixed_fields: ClassVar = {"full_attn_mod": 1}
    # Transformers computes the whole context anew, by the long frequencies, once an answer has outgrown the short ones.
    crosses_threshold: ClassVar = False
