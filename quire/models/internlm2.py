"""InternLM2 (arXiv:2403.17297): Llama with one projection that has, for each key head, its queries, its key, its value.

The configuration's class comes with the checkpoints as code, which is never run: `InternLM2Config` stands for it.
Modules are called as in Llama, but for `wqkv`; files and adapters have other names for them. Configuration fields that
shape the arithmetic, beyond the decoder's (see `decoder.py`): bias, of the attention's projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig

from quire.layers import ROTARY_FIELDS, Linear, PagedAttention, grouped_heads
from quire.models.decoder import Biases, DecoderAttention, DecoderForCausalLM
from quire.types import AttentionSpec


class InternLM2Config(PretrainedConfig):  # type: ignore[misc]  # transformers gives it no type
    """What the files leave out."""

    model_type = "internlm2"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 103168, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bias": True, "rope_theta": 10000.0, "rope_scaling": None,
    }  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**self.DEFAULTS, **fields})


class InternLM2Attention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        nn.Module.__init__(self)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.wqkv = Linear(config.hidden_size, width, bias=biases.qkv)
        self.o_proj = Linear(spec.num_heads * spec.head_dim, config.hidden_size, bias=biases.out)
        self.attend = PagedAttention.from_spec(spec)
        self.order = grouped_heads(spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.attend.split(self.order(self.wqkv(x)))


# Parts of names: in memory, in files.
_PARTS = (
    ("embed_tokens", "tok_embeddings"), ("self_attn.wqkv", "attention.wqkv"), ("self_attn.o_proj", "attention.wo"),
    ("self_attn", "attention"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"), ("mlp", "feed_forward"), ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"), ("lm_head", "output"),
)  # fmt: skip


class InternLM2ForCausalLM(DecoderForCausalLM):
    attention_class: ClassVar = InternLM2Attention
    supported_fields: ClassVar = ROTARY_FIELDS | {"bias"}
    checkpoint_renames = tuple(
        (rf"((?:model\.)?(?:layers\.\d+\.)?){theirs}\.(weight|bias)", rf"\1{ours}.\2")
        for ours, theirs in ((ours, theirs.replace(".", r"\.")) for ours, theirs in _PARTS)
    )
    checkpoint_ignored = (r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq",)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.bias, out=config.bias)

    def published_names(self, name: str) -> tuple[str, ...]:
        for ours, theirs in _PARTS:
            dotted = f".{name}.".replace(f".{ours}.", f".{theirs}.")
            if dotted != f".{name}.":
                return (dotted.strip("."),)
        return (name,)
