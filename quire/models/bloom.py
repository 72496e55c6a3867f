"""BLOOM (arXiv:2211.05100).

ALiBi (arXiv:2108.12409) instead of positions, a norm of the embeddings, one projection in which a head's query, key and
value lie side by side. Configuration fields that shape the arithmetic: hidden_size, n_layer, n_head,
layer_norm_epsilon, apply_residual_connection_post_layernorm, vocab_size and tie_word_embeddings. seq_length, which
published files have, says how long the texts were that it was trained on. pretraining_tp says how sums
were cut into pieces; here they are not, so slow_but_exact, by which transformers cuts them, is refused with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import Embedding, LayerNorm, Linear, grouped_heads
from quire.models.base import CausalLM, refuse
from quire.models.classic import FusedAttention, PlainMLP, alibi_slopes
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# How far a model goes whose file does not say.
LENGTH = 2048


class BloomForCausalLM(CausalLM):
    # The published files are of the bare model, without a prefix.
    checkpoint_renames = ((r"((?:word_embeddings|word_embeddings_layernorm|h|ln_f)\..+)", r"transformer.\1"),)
    supported_fields: ClassVar = frozenset({"apply_residual_connection_post_layernorm"})
    tied_weights: Mapping[str, str] = {"lm_head.weight": "transformer.word_embeddings.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = BloomModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.n_layer)
        self.max_model_len = getattr(config, "seq_length", None) or LENGTH

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.hidden_size % config.n_head:
            refuse(config, "n_head", f"it must divide hidden_size={config.hidden_size}")
        if getattr(config, "slow_but_exact", False) and getattr(config, "pretraining_tp", 1) > 1:
            refuse(config, "slow_but_exact", "where pretraining_tp is above 1, transformers leaves biases out")

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.word_embeddings(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer(embeddings, ctx, kv)


class BloomModel(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.word_embeddings = Embedding(config.vocab_size, hidden)
        self.word_embeddings_layernorm = LayerNorm(hidden, eps)
        self.h = nn.ModuleList(BloomBlock(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(hidden, eps)

    def forward(self, words: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        residual, x = self.word_embeddings_layernorm(words), None
        for block, cache in zip(self.h, kv, strict=True):
            residual, x = block(residual, x, ctx, cache)
        return self.ln_f(residual, x)


class BloomBlock(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, spec = config.hidden_size, attention_spec(config)
        self.from_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = LayerNorm(hidden, config.layer_norm_epsilon)
        self.post_attention_layernorm = LayerNorm(hidden, config.layer_norm_epsilon)
        self.self_attention = FusedAttention(spec, hidden, order=grouped_heads(spec.num_heads, 1))
        self.mlp = PlainMLP(("dense_h_to_4h", "dense_4h_to_h"), hidden, 4 * hidden, "gelu_pytorch_tanh")

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, ctx: ForwardContext, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the block before left to add. Returns both
        for the next; the residual stream goes on from the norms, if `from_norm`."""
        normed = self.input_layernorm(residual, x)
        residual = normed if self.from_norm else residual
        x = self.self_attention(normed, None, ctx, cache)
        normed = self.post_attention_layernorm(residual, x)
        return normed if self.from_norm else residual, self.mlp(normed)


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    heads = config.n_head
    return AttentionSpec(heads, heads, config.hidden_size // heads, alibi_slopes=alibi_slopes(heads))
