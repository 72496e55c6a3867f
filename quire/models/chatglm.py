"""ChatGLM2, ChatGLM3 and the first GLM-4 (arXiv:2406.12793), as THUDM published them: ChatGLMModel.

Llama's block with one projection for query, key and value and one for gate and up, and rotary positions on the first
half of each head, in pairs side by side. The configuration's class comes with the checkpoints as code, which is never
run: `ChatGLMConfig` stands for it. Its fields that shape the arithmetic: hidden_size, ffn_hidden_size, num_layers,
num_attention_heads, multi_query_attention, multi_query_group_num, kv_channels, layernorm_epsilon, add_bias_linear,
add_qkv_bias, rope_ratio (times the base of 10000), seq_length and padded_vocab_size.
apply_query_key_layer_scaling divides and multiplies by the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig

from quire.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, RotaryTable, gated_activation
from quire.models.base import CausalLM, refuse
from quire.models.classic import FusedAttention, run, sequential
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec


class ChatGLMConfig(PretrainedConfig):  # type: ignore[misc]  # transformers gives it no type
    """What the files leave out."""

    model_type = "chatglm"
    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size", "max_position_embeddings": "seq_length",
    }  # fmt: skip
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_layers": 28, "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696,
        "kv_channels": 128, "num_attention_heads": 32, "seq_length": 2048, "layernorm_epsilon": 1e-5, "rope_ratio": 1,
        "rmsnorm": True, "apply_residual_connection_post_layernorm": False, "post_layer_norm": True,
        "add_bias_linear": False, "add_qkv_bias": False, "multi_query_attention": False, "multi_query_group_num": 1,
        "fp32_residual_connection": False, "original_rope": True, "tie_word_embeddings": False,
    }  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**self.DEFAULTS, **fields})


# What the class does no other way.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "rmsnorm": (True,),
    "post_layer_norm": (True,),
    "original_rope": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "fp32_residual_connection": (False,),
    "tie_word_embeddings": (False,),
    "pre_seq_len": (None, 0),
    "quantization_bit": (None, 0),
}
_COUNTS = ("num_layers", "padded_vocab_size", "ffn_hidden_size", "kv_channels", "multi_query_group_num", "seq_length")


class ChatGLMModel(CausalLM):
    checkpoint_renames = ((r"transformer\.output_layer\.(.+)", r"lm_head.\1"),)
    checkpoint_ignored = (r"transformer\.rotary_pos_emb\.inv_freq",)
    supported_fields: ClassVar = frozenset({"add_bias_linear", "multi_query_attention", "original_rope", "rope_ratio"})

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMTransformer(config)
        self.lm_head = Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.num_layers)
        self.max_model_len = config.seq_length

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        if hasattr(config, "position_encoding_2d") or hasattr(config, "inner_hidden_size"):
            refuse(
                config, "architectures", "ChatGLM-6B, the first one, is another model (prefixes seen from both sides)"
            )
        super().check_config(config)
        for field, served in _ONLY.items():
            if getattr(config, field, served[0]) not in served:
                refuse(config, field, f"served only with {' or '.join(map(repr, served))}")
        for field in _COUNTS:
            if type(getattr(config, field)) is not int or getattr(config, field) < 1:
                refuse(config, field, "it must be a whole number above 0")
        if config.num_attention_heads % groups(config):
            refuse(config, "multi_query_group_num", f"it must divide num_attention_heads={config.num_attention_heads}")
        if type(config.rope_ratio) not in (int, float) or not 0 < config.rope_ratio < 1e9:
            refuse(config, "rope_ratio", "it must be a number above 0")

    def published_names(self, name: str) -> tuple[str, ...]:
        return ("transformer.output_layer" if name == "lm_head" else name,)

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.transformer.encoder.layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.embedding.word_embeddings(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer.encoder(embeddings, ctx, kv)


class ChatGLMTransformer(nn.Module):
    """Only here for the parameters' names."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embedding = ChatGLMEmbedding(config)
        self.encoder = ChatGLMEncoder(config)


class ChatGLMEmbedding(nn.Module):
    """Only here for the parameters' names."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.padded_vocab_size, config.hidden_size)


class ChatGLMEncoder(nn.Module):
    """The decoder; the files call it so."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChatGLMBlock(config) for _ in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        theta, turned = 10000.0 * config.rope_ratio, config.kv_channels // 2
        parameters = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}
        self.rotary = RotaryEmbedding(config, interleaved=True, head_dim=turned, parameters=parameters)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.final_layernorm(residual, run(self.layers, residual, self.rotary(ctx), ctx, kv))


class ChatGLMBlock(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, eps, bias = config.hidden_size, config.layernorm_epsilon, config.add_bias_linear
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attention = FusedAttention(attention_spec(config), hidden, biases=(bias or config.add_qkv_bias, bias))
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = ChatGLMMLP(config)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        norms = self.input_layernorm, self.post_attention_layernorm
        return sequential(residual, x, norms, lambda normed: self.self_attention(normed, rope, ctx, cache), self.mlp)


class ChatGLMMLP(nn.Module):
    """Gate and up are one layer, the gate first."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.dense_h_to_4h = Linear(hidden, 2 * inner, bias=bias)
        self.dense_4h_to_h = Linear(inner, hidden, bias=bias)
        self.activate = gated_activation("silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(self.activate(self.dense_h_to_4h(x)))


def groups(config: PretrainedConfig) -> int:
    """Keys of a layer."""
    return config.multi_query_group_num if config.multi_query_attention else config.num_attention_heads


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    return AttentionSpec(config.num_attention_heads, groups(config), config.kv_channels)
