"""GPT-NeoX (arXiv:2204.06745), Pythia (arXiv:2304.01373) and whatever else is published as GPTNeoXForCausalLM.

Rotary positions on a part of each head, one projection in which a head's query, key and value lie side by side, and
blocks whose attention and feed-forward read the same (use_parallel_residual) or one after the other. Configuration
fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, hidden_act,
layer_norm_eps, attention_bias, use_parallel_residual, max_position_embeddings, tie_word_embeddings, vocab_size, and the
rotary ones, of which rotary_pct is a quarter by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    LayerNorm,
    Linear,
    RotaryEmbedding,
    RotaryTable,
    grouped_heads,
)
from quire.models.base import CausalLM, refuse
from quire.models.classic import FusedAttention, PlainMLP, parallel, run, sequential
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GPTNeoXForCausalLM(CausalLM):
    # Until transformers 5 the projection to the vocabulary was called so, and files still call it so.
    checkpoint_renames = ((r"embed_out\.(.+)", r"lm_head.\1"),)
    # Causal masks and rotary frequencies, which old versions stored as if they were weights.
    checkpoint_ignored = (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)
    supported_fields: ClassVar = ROTARY_FIELDS | {"attention_bias", "use_parallel_residual"}
    tied_weights: Mapping[str, str] = {"lm_head.weight": "gpt_neox.embed_in.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.gpt_neox = GPTNeoXModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.num_hidden_layers)
        self.max_model_len = self.gpt_neox.rotary.max_positions
        self.rope_threshold = self.gpt_neox.rotary.threshold

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.hidden_size % config.num_attention_heads:
            refuse(config, "num_attention_heads", f"it must divide hidden_size={config.hidden_size}")

    def published_names(self, name: str) -> tuple[str, ...]:
        return ("embed_out" if name == "lm_head" else name, name)

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.gpt_neox.layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.gpt_neox.embed_in(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.gpt_neox(embeddings, ctx, kv)


class GPTNeoXModel(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_in = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GPTNeoXLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        x = run(self.layers, residual, self.rotary(ctx), ctx, kv)
        return self.final_layer_norm(residual, x)


class GPTNeoXLayer(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.block = parallel if config.use_parallel_residual else sequential
        self.input_layernorm = LayerNorm(hidden, config.layer_norm_eps)
        self.post_attention_layernorm = LayerNorm(hidden, config.layer_norm_eps)
        spec = attention_spec(config)
        self.attention = FusedAttention(spec, hidden, biases=(bias, bias), order=grouped_heads(spec.num_heads, 1))
        self.mlp = PlainMLP(("dense_h_to_4h", "dense_4h_to_h"), hidden, config.intermediate_size, config.hidden_act)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        norms = self.input_layernorm, self.post_attention_layernorm
        return self.block(residual, x, norms, lambda normed: self.attention(normed, rope, ctx, cache), self.mlp)


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    heads = config.num_attention_heads
    return AttentionSpec(heads, heads, config.hidden_size // heads)
