"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners").

Learned positions, pre-norm blocks, one projection for query, key and value. Configuration fields that shape the
arithmetic: n_embd, n_layer, n_head, n_positions, n_inner, activation_function, layer_norm_epsilon, vocab_size,
tie_word_embeddings, scale_attn_weights and scale_attn_by_inverse_layer_idx. reorder_and_upcast_attn asks for sums in
float32, which the kernels always keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import Embedding, LayerNorm, Linear, PagedAttention, activation
from quire.models.base import CausalLM
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GPT2LMHeadModel(CausalLM):
    # Checkpoints saved from the bare model have no prefix.
    checkpoint_renames = ((r"((?:wte|wpe|h|ln_f)\..+)", r"transformer.\1"),)
    # Causal masks, which old versions stored as if they were weights.
    checkpoint_ignored = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)
    # Written by a layer that multiplies from the other side ("Conv1D").
    checkpoint_transposed = (r"transformer\.h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",)
    supported_fields: ClassVar = frozenset(
        {"scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"}
    )
    tied_weights: Mapping[str, str] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of(attention_spec(config, layer) for layer in range(config.n_layer))
        self.max_model_len = config.n_positions

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.n_embd % config.n_head:
            raise UnsupportedModelError(
                f"config.json: n_embd={config.n_embd} is not a multiple of n_head={config.n_head}."
            )

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.transformer.h

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.wte(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer(embeddings, ctx, kv)


class GPT2Model(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(GPT2Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(self, words: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        residual, x = self.wpe(ctx.positions, words), None
        for block, cache in zip(self.h, kv, strict=True):
            x = block(residual, x, ctx, cache)
        return self.ln_f(residual, x)


class GPT2Block(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, ctx: ForwardContext, cache: KVCache
    ) -> torch.Tensor:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the block before left to add."""
        x = self.attn(self.ln_1(residual, x), ctx, cache)
        return self.mlp(self.ln_2(residual, x))


class GPT2Attention(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.attend = PagedAttention.from_spec(attention_spec(config, layer))

    def forward(self, x: torch.Tensor, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        return self.c_proj(self.attend(self.c_attn(x), ctx, cache))


class GPT2MLP(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        inner = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        self.c_fc = Linear(config.n_embd, inner)
        self.c_proj = Linear(inner, config.n_embd)
        self.activate = activation(config.activation_function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.activate(self.c_fc(x)))


def attention_spec(config: PretrainedConfig, layer: int) -> AttentionSpec:
    size = config.n_embd // config.n_head
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    return AttentionSpec(config.n_head, config.n_head, size, scale)
