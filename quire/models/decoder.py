"""The decoder that most families share: pre-norm blocks of grouped-query attention and a gated feed-forward.

Root mean square norms (arXiv:1910.07467), grouped-query attention (arXiv:2305.13245), rotary positions
(arXiv:2104.09864), SwiGLU (arXiv:2002.05202). A family derives from `DecoderForCausalLM` and says what is its own:
`attention_spec`, `biases`, `attention_class` and `mlp_class`. Modules are called as in Llama's state dict.

Configuration fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps, tie_word_embeddings, vocab_size,
max_position_embeddings, and the rotary ones (see `layers/rotary.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    Linear,
    MergedLinear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
    RotaryTable,
    gated_activation,
)
from quire.models.base import CausalLM
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Biases(NamedTuple):
    """Which of a layer's projections have a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


class DecoderAttention(nn.Module):
    """Project, norms of heads, rotate, store, attend. A family overrides the steps that are its own."""

    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__()
        hidden, heads, kv_heads, size = config.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_proj = Linear(hidden, heads * size, bias=biases.qkv)
        self.k_proj = Linear(hidden, kv_heads * size, bias=biases.qkv)
        self.v_proj = Linear(hidden, kv_heads * size, bias=biases.qkv)
        self.o_proj = Linear(heads * size, hidden, bias=biases.out)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(spec)

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        query, key, value = self.project(x)
        query, key = self.norm_heads(query, key)
        return self.o_proj(self.attend.of(query, key, value, ctx, cache, rope))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: [T, C] -> query [T, H, D], key and value [T, G, D]."""
        return self.attend.split(self.qkv(x))

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key as they are rotated. Most families have no norms of heads."""
        return query, key


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))"""

    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=biases.mlp)
        self.up_proj = Linear(hidden, inner, bias=biases.mlp)
        self.down_proj = Linear(inner, hidden, bias=biases.mlp)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)
        self.activate = gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_up(x)))


class DecoderForCausalLM(CausalLM):
    """A family of such decoders.

    attention_class, mlp_class: made of (config, spec, biases) and of (config, biases) for each layer.
    """

    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    supported_fields: ClassVar[frozenset[str]] = ROTARY_FIELDS
    checkpoint_ignored: Sequence[str] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention
    mlp_class: ClassVar[type[nn.Module]] = GatedMLP

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config, type(self))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kv_spec = KVSpec.of(self.attention_spec(config, layer) for layer in range(config.num_hidden_layers))
        self.max_model_len = self.model.rotary.max_positions
        self.rope_threshold = self.model.rotary.threshold

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_attention_heads % kv_heads(config):
            raise UnsupportedModelError(
                f"config.json: num_attention_heads={config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}."
            )

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        """What the attention of layer number `layer` computes."""
        return AttentionSpec(config.num_attention_heads, kv_heads(config), head_dim(config))

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.model(embeddings, ctx, kv)


class Decoder(nn.Module):
    def __init__(self, config: PretrainedConfig, family: type[DecoderForCausalLM]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, family, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        rope, x = self.rotary(ctx), None
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer(residual, x, rope, ctx, cache)
        return self.norm(residual, x)


class DecoderLayer(nn.Module):
    def __init__(self, config: PretrainedConfig, family: type[DecoderForCausalLM], layer: int) -> None:
        super().__init__()
        biases = family.biases(config)
        self.self_attn = family.attention_class(config, family.attention_spec(config, layer), biases)
        self.mlp = family.mlp_class(config, biases)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the layer before left to add."""
        x = self.self_attn(self.input_layernorm(residual, x), rope, ctx, cache)
        return self.mlp(self.post_attention_layernorm(residual, x))


def head_dim(config: PretrainedConfig) -> int:
    """`head_dim` where the configuration has it; it need not be hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
