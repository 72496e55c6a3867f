"""Qwen2 (arXiv:2407.10671) and whatever else is published as Qwen2ForCausalLM: Llama with other biases.

Query, key and value projections always have one and nothing else does, whatever attention_bias or mlp_bias say: in
transformers, too, they are none of Qwen2's fields. The fields that shape the arithmetic are Llama's others (see
`llama.py`). Transformers makes sliding_window and layer_types of use_sliding_window and max_window_layers; the base
class refuses windows by those two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.models.decoder import Biases
from quire.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2ForCausalLM(LlamaForCausalLM):
    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=True)
