"""Baichuan and Baichuan 2 (arXiv:2309.10305): Llama with one projection for query, key and value.

The 7B models have rotary positions, the 13B models ALiBi (arXiv:2108.12409): config.json tells them apart by
`max_position_embeddings`, which only the former have. Baichuan 2 normalises the rows of the projection to the
vocabulary. The configuration's class comes with the checkpoints as code, which is never run: `BaichuanConfig` stands
for it. Its fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
hidden_act, rms_norm_eps, vocab_size, tie_word_embeddings, max_position_embeddings and model_max_length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig

from quire.layers import ROTARY_FIELDS, Linear, PagedAttention, RotaryEmbedding
from quire.models.base import refuse
from quire.models.classic import alibi_slopes
from quire.models.decoder import Biases, DecoderAttention, DecoderForCausalLM
from quire.types import AttentionSpec

# Rows that are normalised at a time.
_ROWS = 4096


class BaichuanConfig(PretrainedConfig):  # type: ignore[misc]  # transformers gives it no type
    """What the files leave out, and what they say without a field of its own.

    alibi: whether positions are ALiBi's. norm_head: whether the rows of the projection to the vocabulary are
    normalised: Baichuan 2's classes alone have `z_loss_weight`, and its vocabulary alone has 125,696 tokens.
    """

    model_type = "baichuan"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 64000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6, "model_max_length": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        known = {**self.DEFAULTS, **fields}
        known.setdefault("alibi", "max_position_embeddings" not in known)
        known.setdefault("norm_head", "z_loss_weight" in known or known["vocab_size"] == 125696)
        known.setdefault("max_position_embeddings", known["model_max_length"])
        super().__init__(**known)


class BaichuanAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        nn.Module.__init__(self)
        self.W_pack = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.attend = PagedAttention.from_spec(spec)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.attend.split(self.W_pack(x))


class BaichuanForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"alibi", "norm_head"}
    attention_class: ClassVar = BaichuanAttention

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.hidden_size % config.num_attention_heads:
            refuse(config, "num_attention_heads", f"it must divide hidden_size={config.hidden_size}")
        if config.norm_head and config.tie_word_embeddings:
            refuse(config, "tie_word_embeddings", "Baichuan 2 normalises the rows of a projection that is its own")

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        heads = config.num_attention_heads
        slopes = alibi_slopes(heads) if config.alibi else ()
        return AttentionSpec(heads, heads, config.hidden_size // heads, alibi_slopes=slopes)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return () if config.alibi else (RotaryEmbedding(config),)

    def published_names(self, name: str) -> tuple[str, ...]:
        # What an adapter puts in the place of normalised rows would have to be normalised, too: none finds the name.
        return ("lm_head (normalised)" if name == "lm_head" and self.config.norm_head else name,)

    def keeps_floats(self, name: str) -> bool:
        return bool(self.config.norm_head) and name == "lm_head"

    def loaded(self) -> None:
        if self.config.norm_head:
            for rows in self.lm_head.weight.data[self.own_rows("lm_head.weight")].split(_ROWS):
                rows.copy_(nn.functional.normalize(rows.float()))
