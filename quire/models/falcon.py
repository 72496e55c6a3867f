"""Falcon (arXiv:2311.16867), in the layouts that were published as FalconForCausalLM.

7B: one key and value for all heads, attention and feed-forward read one norm of the residual stream. 40B, 180B and
Falcon 2 (new_decoder_architecture): groups of queries, each followed by its key and value, and a norm each for
attention and feed-forward (num_ln_in_parallel_attn: 2, or 1 for both). The feed-forward may also come after attention
(parallel_attn false). Configuration fields that shape the arithmetic: these, and hidden_size, ffn_hidden_size,
num_hidden_layers, num_attention_heads, num_kv_heads, multi_query, bias, activation, layer_norm_epsilon,
max_position_embeddings, vocab_size, tie_word_embeddings, and the rotary ones.

Falcon-RW (alibi) has ALiBi (arXiv:2108.12409) instead of rotary positions, computed in bfloat16 whatever the model's
dtype: what is added to a score is the slope times the key's position, rounded, which is no straight line any more. So a
key keeps the number that is added to its scores, as one more dimension, which each query has as 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    LayerNorm,
    Linear,
    PagedAttention,
    RotaryEmbedding,
    RotaryTable,
    grouped_heads,
)
from quire.layers.rotary import rope_parameters
from quire.models.base import CausalLM, refuse
from quire.models.classic import FusedAttention, PlainMLP, alibi_slopes, parallel, run, sequential
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Dimensions that a key has beside its own where there is ALiBi. One would do; the kernels like multiples of eight.
FURTHER = 8


class FalconForCausalLM(CausalLM):
    # Checkpoints saved from the bare model have no prefix.
    checkpoint_renames = ((r"((?:word_embeddings|h|ln_f)\..+)", r"transformer.\1"),)
    checkpoint_ignored = (r"transformer\.(h\.\d+\.self_attention\.)?rotary(_emb)?\.inv_freq",)
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "activation",
        "alibi",
        "bias",
        "num_ln_in_parallel_attn",
        "parallel_attn",
    }
    tied_weights: Mapping[str, str] = {"lm_head.weight": "transformer.word_embeddings.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = FalconModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.num_hidden_layers)
        rotary = self.transformer.rotary
        self.max_model_len = config.max_position_embeddings if rotary is None else rotary.max_positions
        self.rope_threshold = None if rotary is None else rotary.threshold

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        heads, groups = config.num_attention_heads, config.num_kv_heads
        if config.hidden_size % heads:
            refuse(config, "num_attention_heads", f"it must divide hidden_size={config.hidden_size}")
        if config.new_decoder_architecture and (type(groups) is not int or groups < 1 or heads % groups):
            refuse(config, "num_kv_heads", f"it must divide num_attention_heads={heads}")
        if config.new_decoder_architecture and not config.parallel_attn:
            refuse(config, "parallel_attn", "with new_decoder_architecture, transformers has it no other way than true")
        if config.rotary and rope_parameters(config)["partial_rotary_factor"] != 1.0:
            refuse(config, "partial_rotary_factor", "transformers' Falcon turns whole heads")
        if config.alibi and (config.new_decoder_architecture or config.multi_query):
            refuse(config, "alibi", "served where each head of queries has a key of its own")
        norms = config.num_ln_in_parallel_attn
        if norms not in (None, 1, 2) or (norms == 2 and not config.new_decoder_architecture):
            refuse(
                config, "num_ln_in_parallel_attn", "served with 1, and with 2 where new_decoder_architecture is true"
            )

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.transformer.h

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.word_embeddings(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer(embeddings, ctx, kv)


class FalconModel(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(FalconBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.rotary = None if config.alibi else RotaryEmbedding(config)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        rope = None if self.rotary is None else self.rotary(ctx)
        return self.ln_f(residual, run(self.h, residual, rope, ctx, kv))


class FalconBlock(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, bias, spec = config.hidden_size, config.bias, attention_spec(config)
        self.parallel = config.parallel_attn
        self.norms = norm_names(config)
        for name in self.norms:
            self.add_module(name, LayerNorm(hidden, config.layer_norm_epsilon))
        queries = spec.num_heads // spec.num_kv_heads
        # With one key for all heads they lie as attention takes them.
        order = None if spec.num_kv_heads == 1 else grouped_heads(spec.num_kv_heads, queries)
        self.self_attention: nn.Module
        if config.alibi:
            self.self_attention = FalconAlibiAttention(config)
        else:
            self.self_attention = FusedAttention(spec, hidden, biases=(bias, bias), order=order)
        names = "dense_h_to_4h", "dense_4h_to_h"
        self.mlp = PlainMLP(names, hidden, config.ffn_hidden_size, config.activation, bias=bias)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable | None,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        first, *others = (self.get_submodule(name) for name in self.norms)

        def attend(normed: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.self_attention(normed, rope, ctx, cache)
            return y

        if self.parallel:
            return parallel(residual, x, (first, others[0] if others else None), attend, self.mlp)
        return sequential(residual, x, (first, others[0]), attend, self.mlp)


class FalconAlibiAttention(nn.Module):
    """Queries and keys with `FURTHER` dimensions. A key's: what is added to its scores, and zeros; a query's: ones."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, spec = config.hidden_size, attention_spec(config)
        self.query_key_value = Linear(hidden, 3 * hidden, bias=config.bias)
        self.dense = Linear(hidden, hidden, bias=config.bias)
        self.order = grouped_heads(spec.num_heads, 1)
        self.attend = PagedAttention.from_spec(spec)
        self.added = added_to_scores(spec.num_heads, config.max_position_embeddings)

    def forward(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        tokens, heads = len(x), self.attend.spec.num_heads
        query, key, value = self.order(self.query_key_value(x)).view(tokens, 3, heads, -1).unbind(1)
        more = kernels.embedding(ctx.positions, self.added.like(x)).view(tokens, heads + 1, FURTHER)
        key = kernels.join_heads(key, more[:, :-1])
        query = kernels.join_heads(query, more[:, -1:].expand(-1, heads, -1))
        return self.dense(self.attend.of(query, key, value, ctx, cache))


class AddedToScores:
    """For each position, the further dimensions of all heads' keys, and a query's: [positions, (H + 1) * FURTHER].

    By the operations of transformers' Falcon, in bfloat16.
    """

    def __init__(self, heads: int, positions: int) -> None:
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}  # recorded steps know their addresses
        with torch.device("cpu"):
            slopes = torch.tensor(alibi_slopes(heads)).bfloat16()
            self._table = torch.zeros(positions, heads + 1, FURTHER)
            self._table[:, :-1, 0] = (slopes.unsqueeze(1) * torch.arange(positions)).T
            self._table[:, -1] = 1

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """The table on x's device, in its dtype."""
        place = x.device, x.dtype
        if place not in self._tables:
            table = self._table.flatten(1).to(*place)
            if x.is_meta:  # a rehearsal's: nothing of it is kept
                return table
            self._tables[place] = table
        return self._tables[place]


@cache
def added_to_scores(heads: int, positions: int) -> AddedToScores:
    """One for all layers of a model."""
    return AddedToScores(heads, positions)


def norm_names(config: PretrainedConfig) -> tuple[str, ...]:
    """Of a block's norms, attention's first."""
    if not config.parallel_attn:
        return "input_layernorm", "post_attention_layernorm"
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2):
        return "ln_attn", "ln_mlp"
    return ("input_layernorm",)


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    heads = config.num_attention_heads
    groups = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    size = config.hidden_size // heads
    if config.alibi:
        return AttentionSpec(heads, groups, size + FURTHER, size**-0.5, value_dim=size)
    return AttentionSpec(heads, groups, size)
