"""Starcoder2 (arXiv:2402.19173) for quire: pre-norm blocks of grouped-query attention with rotary positions.

Configuration fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, hidden_act, norm_epsilon, use_bias, tie_word_embeddings,
vocab_size and the rotary ones. The base class refuses a sliding_window that is not null; the checkpoints
that BigCode published have one of 4096.
"""

from collections.abc import Mapping

from torch import nn

from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    LayerNorm,
    Linear,
    MergedLinear,
    PagedAttention,
    RotaryEmbedding,
    activation,
)
from quire.models.base import CausalLM, refuse
from quire.types import KVSpec


class Starcoder2ForCausalLM(CausalLM):
    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    supported_fields = ROTARY_FIELDS | {"use_bias", "norm_epsilon"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Starcoder2Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        head_dim = config.hidden_size // config.num_attention_heads
        self.kv_spec = KVSpec(config.num_hidden_layers, config.num_key_value_heads, head_dim)
        self.max_model_len = self.model.rotary.max_positions
        self.rope_threshold = self.model.rotary.threshold

    @classmethod
    def check_config(cls, config):
        super().check_config(config)
        if config.num_attention_heads % config.num_key_value_heads:
            refuse(config, "num_key_value_heads", "it must divide num_attention_heads")

    def embed(self, input_ids):
        return self.model.embed_tokens(input_ids)

    def forward(self, embeddings, ctx, kv):
        return self.model(embeddings, ctx, kv)


class Starcoder2Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Starcoder2Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon)
        self.rotary = RotaryEmbedding(config)

    def forward(self, residual, ctx, kv):
        rope, x = self.rotary(ctx), None  # once a step, for all layers
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer(residual, x, rope, ctx, cache)
        return self.norm(residual, x)


class Starcoder2Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Starcoder2Attention(config)
        self.mlp = Starcoder2MLP(config)
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_epsilon)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, residual, x, rope, ctx, cache):
        # Each norm adds x to the residual stream first: what the part before it left to add.
        x = self.self_attn(self.input_layernorm(residual, x), rope, ctx, cache)
        return self.mlp(self.post_attention_layernorm(residual, x))


class Starcoder2Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        head_dim = hidden // heads
        self.q_proj = Linear(hidden, heads * head_dim, bias=config.use_bias)
        self.k_proj = Linear(hidden, kv_heads * head_dim, bias=config.use_bias)
        self.v_proj = Linear(hidden, kv_heads * head_dim, bias=config.use_bias)
        self.o_proj = Linear(heads * head_dim, hidden, bias=config.use_bias)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention(heads, kv_heads, head_dim)

    def forward(self, x, rope, ctx, cache):
        return self.o_proj(self.attend(self.qkv(x), ctx, cache, rope))


class Starcoder2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.c_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)
        self.activate = activation(config.hidden_act)

    def forward(self, x):
        return self.c_proj(self.activate(self.c_fc(x)))
