"""OPT (arXiv:2205.01068).

Learned positions and plain feed-forward. Blocks are pre-norm, or post-norm in the 350m model
(do_layer_norm_before=False), which also has narrower word embeddings (word_embed_proj_dim). Galactica
(arXiv:2211.09085) is this without biases (enable_bias) and without norm weights
(layer_norm_elementwise_affine). Configuration fields that shape the arithmetic: these, and hidden_size,
ffn_dim, num_hidden_layers, num_attention_heads, activation_function, max_position_embeddings, vocab_size,
tie_word_embeddings and _remove_final_layer_norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import Embedding, LayerNorm, Linear, MergedLinear, PagedAttention, activation
from quire.models.base import CausalLM
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The position table's first rows were meant for padding: position p is row p + 2.
POSITION_OFFSET = 2


class OPTForCausalLM(CausalLM):
    # Checkpoints saved from the bare model, and the oldest ones, leave out parts of the prefix.
    checkpoint_renames = ((r"decoder\.(.+)", r"model.decoder.\1"),)
    supported_fields: ClassVar = frozenset(
        {"do_layer_norm_before", "_remove_final_layer_norm", "enable_bias", "layer_norm_elementwise_affine"}
    )
    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = OPTModel(config)
        self.lm_head = Linear(config.word_embed_proj_dim, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.num_hidden_layers)
        self.max_model_len = config.max_position_embeddings

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.hidden_size % config.num_attention_heads:
            raise UnsupportedModelError(
                f"config.json: hidden_size={config.hidden_size} is not a multiple of "
                f"num_attention_heads={config.num_attention_heads}."
            )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.decoder.embed_tokens(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.model.decoder(embeddings, ctx, kv)


class OPTModel(nn.Module):
    """Only here for the parameters' names."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config)


class OPTDecoder(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, word = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = Embedding(config.vocab_size, word)
        self.embed_positions = Embedding(config.max_position_embeddings + POSITION_OFFSET, hidden)
        self.project_in = Linear(word, hidden, bias=False) if word != hidden else None
        self.project_out = Linear(hidden, word, bias=False) if word != hidden else None
        self.layers = nn.ModuleList(OPTLayer(config) for _ in range(config.num_hidden_layers))
        # Some models fine-tuned before transformers 4.20 were trained without the last norm.
        last_norm = config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False)
        self.final_layer_norm = layer_norm(config) if last_norm else None

    def forward(self, words: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        if self.project_in is not None:
            words = self.project_in(words)
        residual, x = self.embed_positions(ctx.positions, words, POSITION_OFFSET), None
        for layer, cache in zip(self.layers, kv, strict=True):
            residual, x = layer(residual, x, ctx, cache)
        if self.final_layer_norm is not None:
            residual = self.final_layer_norm(residual, x)
        elif x is not None:
            residual = residual + x
        return residual if self.project_out is None else self.project_out(residual)


class OPTLayer(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.enable_bias
        self.norm_first = config.do_layer_norm_before
        self.self_attn = OPTAttention(config)
        self.self_attn_layer_norm = layer_norm(config)
        self.fc1 = Linear(hidden, config.ffn_dim, bias=bias)
        self.fc2 = Linear(config.ffn_dim, hidden, bias=bias)
        self.final_layer_norm = layer_norm(config)
        self.activate = activation(config.activation_function)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, ctx: ForwardContext, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual, x: [T, C] each; x is what is still to be added to the residual stream (None: nothing)."""
        if self.norm_first:
            x = self.self_attn(self.self_attn_layer_norm(residual, x), ctx, cache)
            return residual, self.feed_forward(self.final_layer_norm(residual, x))
        residual = self.self_attn_layer_norm(residual, self.self_attn(residual, ctx, cache))
        return self.final_layer_norm(residual, self.feed_forward(residual)), None

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activate(self.fc1(x)))


class OPTAttention(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.enable_bias
        self.q_proj = Linear(hidden, hidden, bias=bias)
        self.k_proj = Linear(hidden, hidden, bias=bias)
        self.v_proj = Linear(hidden, hidden, bias=bias)
        self.out_proj = Linear(hidden, hidden, bias=bias)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(attention_spec(config))

    def forward(self, x: torch.Tensor, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        return self.out_proj(self.attend(self.qkv(x), ctx, cache))


def layer_norm(config: PretrainedConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, affine=config.layer_norm_elementwise_affine)


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    heads = config.num_attention_heads
    return AttentionSpec(heads, heads, config.hidden_size // heads)
