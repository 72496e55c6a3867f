"""Qwen2 (arXiv:2407.10671) for quire: Llama's blocks, whose query, key and value projections have biases.

Configuration fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, hidden_act, rms_norm_eps, tie_word_embeddings, vocab_size and the
rotary ones. Sliding windows (use_sliding_window) are refused by the base class, which sees them in
layer_types.
"""

from typing import ClassVar

from torch import nn

from quire.contracts import KVSpec
from quire.models.base import CausalLM
from quire.models.layers import (
    Embedding,
    Linear,
    MergedLinear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
    gated_activation,
)


class Qwen2ForCausalLM(CausalLM):
    tied_weights: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        head_dim = config.hidden_size // config.num_attention_heads
        self.kv_spec = KVSpec(config.num_hidden_layers, config.num_key_value_heads, head_dim)
        self.max_model_len = self.model.rotary.max_positions
        self.rope_threshold = self.model.rotary.threshold

    def forward(self, input_ids, ctx, kv):
        return self.model(input_ids, ctx, kv)


class Qwen2Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen2Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, input_ids, ctx, kv):
        rope = self.rotary(ctx)  # once a step, for all layers
        residual, x = self.embed_tokens(input_ids), None
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer(residual, x, rope, ctx, cache)
        return self.norm(residual, x)


class Qwen2Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Qwen2Attention(config)
        self.mlp = Qwen2MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, residual, x, rope, ctx, cache):
        x = self.self_attn(
            self.input_layernorm(residual, x), rope, ctx, cache
        )  # residual += x, then normalise
        return self.mlp(self.post_attention_layernorm(residual, x))


class Qwen2Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        head_dim = hidden // heads
        self.q_proj = Linear(hidden, heads * head_dim)
        self.k_proj = Linear(hidden, kv_heads * head_dim)
        self.v_proj = Linear(hidden, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden, bias=False)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention(heads, kv_heads, head_dim)

    def forward(self, x, rope, ctx, cache):
        return self.o_proj(self.attend(self.qkv(x), ctx, cache, rope))


class Qwen2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)
        self.activate = gated_activation(config.hidden_act)

    def forward(self, x):
        return self.down_proj(self.activate(self.gate_up(x)))
