"""Arcee (AFM): Llama with a plain feed-forward, of relu squared.

The configuration fields that shape the arithmetic are Llama's (see `llama.py`).
"""

from __future__ import annotations

from typing import ClassVar

from quire.models.decoder import PlainMLP
from quire.models.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    mlp_class: ClassVar = PlainMLP
