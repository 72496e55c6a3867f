"""Qwen2 (arXiv:2407.10671) and whatever else is published as Qwen2ForCausalLM: Llama with other biases.

Query, key and value projections always have one and nothing else does, whatever attention_bias or mlp_bias say: in
transformers, too, they are none of Qwen2's fields. The fields that shape the arithmetic are Llama's others (see
`llama.py`), and sliding_window in the layers that layer_types calls sliding: transformers makes them of
use_sliding_window and max_window_layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.models.decoder import WINDOW_FIELDS, Biases
from quire.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2ForCausalLM(LlamaForCausalLM):
    supported_fields: ClassVar = LlamaForCausalLM.supported_fields | WINDOW_FIELDS

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=True)
