"""CodeGen (arXiv:2203.13474): GPT-J with one projection for query, key and value.

It was trained on four cores at a time, and its projection lies as these had it: for each quarter of the heads all
queries, then all values, then all keys. The fields that shape the arithmetic are GPT-J's (see `gptj.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.layers import HeadOrder, head_order
from quire.models.base import refuse
from quire.models.classic import FusedAttention
from quire.models.gptj import GPTJForCausalLM, attention_spec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CORES = 4


class CodeGenAttention(FusedAttention):
    def __init__(self, config: PretrainedConfig) -> None:
        names, order = ("qkv_proj", "out_proj"), core_order(config.n_head)
        super().__init__(attention_spec(config), config.n_embd, names, (False, False), order)


class CodeGenForCausalLM(GPTJForCausalLM):
    checkpoint_ignored = (r"transformer\.h\.\d+\.attn\.(causal_mask|bias|masked_bias)",)
    attention_class: ClassVar = CodeGenAttention

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.n_head % CORES:
            refuse(config, "n_head", f"it must be a multiple of {CORES}")


def core_order(heads: int) -> HeadOrder:
    each = heads // CORES

    def places(part: int) -> tuple[int, ...]:
        return tuple((3 * core + part) * each + head for core in range(CORES) for head in range(each))

    return head_order((*places(0), *places(2), *places(1)))
