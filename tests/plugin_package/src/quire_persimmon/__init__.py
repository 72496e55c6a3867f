"""Persimmon (Adept AI, 2023) for quire: pre-norm blocks, norms of heads, and a rotation of half of each head.

Configuration fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
hidden_act, layer_norm_eps, qk_layernorm, tie_word_embeddings, vocab_size and the rotary ones, partial_rotary_factor
among them.
"""

from collections.abc import Mapping

from torch import nn

from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    LayerNorm,
    Linear,
    PagedAttention,
    RotaryEmbedding,
    activation,
    grouped_heads,
)
from quire.models.base import CausalLM, refuse
from quire.types import KVSpec


class PersimmonForCausalLM(CausalLM):
    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    # Old versions of transformers stored this table as if it were a weight.
    checkpoint_ignored = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    supported_fields = ROTARY_FIELDS | {"qk_layernorm"}

    def __init__(self, config):
        super().__init__(config)
        self.model = PersimmonModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        heads = config.num_attention_heads
        self.kv_spec = KVSpec(config.num_hidden_layers, heads, config.hidden_size // heads)
        self.max_model_len = self.model.rotary.max_positions
        self.rope_threshold = self.model.rotary.threshold

    @classmethod
    def check_config(cls, config):
        super().check_config(config)
        if config.hidden_size % config.num_attention_heads:
            refuse(config, "num_attention_heads", "it must divide hidden_size")

    def embed(self, input_ids):
        return self.model.embed_tokens(input_ids)

    def forward(self, embeddings, ctx, kv):
        return self.model(embeddings, ctx, kv)


class PersimmonModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PersimmonLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, residual, ctx, kv):
        rope, x = self.rotary(ctx), None  # once a step, for all layers
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer(residual, x, rope, ctx, cache)
        return self.final_layernorm(residual, x)


class PersimmonLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = PersimmonAttention(config)
        self.mlp = PersimmonMLP(config)
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, residual, x, rope, ctx, cache):
        # Each norm adds x to the residual stream first: what the part before it left to add.
        x = self.self_attn(self.input_layernorm(residual, x), rope, ctx, cache)
        return self.mlp(self.post_attention_layernorm(residual, x))


class PersimmonAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = hidden // heads
        self.query_key_value = Linear(hidden, 3 * hidden)
        self.dense = Linear(hidden, hidden)
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            self.q_layernorm = LayerNorm(head_dim, config.layer_norm_eps)
            self.k_layernorm = LayerNorm(head_dim, config.layer_norm_eps)
        self.attend = PagedAttention(heads, heads, head_dim)
        self.order = grouped_heads(heads, 1)  # the projection has query, key and value of each head side by side

    def forward(self, x, rope, ctx, cache):
        query, key, value = self.attend.split(self.order(self.query_key_value(x)))
        if self.has_norms:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return self.dense(self.attend.of(query, key, value, ctx, cache, rope))


class PersimmonMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = Linear(config.intermediate_size, config.hidden_size)
        self.activate = activation(config.hidden_act)

    def forward(self, x):
        return self.dense_4h_to_h(self.activate(self.dense_h_to_4h(x)))
