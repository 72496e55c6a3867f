"""GPTBigCode: SantaCoder (arXiv:2301.03988), StarCoder (arXiv:2305.06161).

GPT-2 with one key and value for all heads (multi_query), or with a head's query, key and value side by side.
Configuration fields that shape the arithmetic: n_embd, n_layer, n_head, n_positions, n_inner, multi_query,
activation_function, layer_norm_epsilon, scale_attn_weights, vocab_size and tie_word_embeddings.
attention_softmax_in_fp32 and scale_attention_softmax_in_fp32 ask for what the kernels always keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import Embedding, LayerNorm, Linear, grouped_heads
from quire.models.base import CausalLM, refuse
from quire.models.classic import FusedAttention, PlainMLP, run, sequential
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GPTBigCodeForCausalLM(CausalLM):
    # Checkpoints saved from the bare model have no prefix.
    checkpoint_renames = ((r"((?:wte|wpe|h|ln_f)\..+)", r"transformer.\1"),)
    # Causal masks, which old versions stored as if they were weights.
    checkpoint_ignored = (r"transformer\.(h\.\d+\.attn\.)?(bias|masked_bias)",)
    supported_fields: ClassVar = frozenset({"scale_attn_weights"})
    tied_weights: Mapping[str, str] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = GPTBigCodeModel(config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.n_layer)
        self.max_model_len = config.n_positions

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.n_embd % config.n_head:
            refuse(config, "n_head", f"it must divide n_embd={config.n_embd}")

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.transformer.h

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.wte(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer(embeddings, ctx, kv)


class GPTBigCodeModel(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(GPTBigCodeBlock(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(self, words: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        residual = self.wpe(ctx.positions, words)
        return self.ln_f(residual, run(self.h, residual, None, ctx, kv))


class GPTBigCodeBlock(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, spec = config.n_embd, attention_spec(config)
        inner = config.n_inner if config.n_inner is not None else 4 * hidden
        order = None if config.multi_query else grouped_heads(spec.num_heads, 1)
        self.ln_1 = LayerNorm(hidden, config.layer_norm_epsilon)
        self.attn = FusedAttention(spec, hidden, ("c_attn", "c_proj"), order=order)
        self.ln_2 = LayerNorm(hidden, config.layer_norm_epsilon)
        self.mlp = PlainMLP(("c_fc", "c_proj"), hidden, inner, config.activation_function)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, rope: None, ctx: ForwardContext, cache: KVCache
    ) -> torch.Tensor:
        norms = self.ln_1, self.ln_2
        return sequential(residual, x, norms, lambda normed: self.attn(normed, rope, ctx, cache), self.mlp)


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    heads, size = config.n_head, config.n_embd // config.n_head
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    return AttentionSpec(heads, 1 if config.multi_query else heads, size, scale)
