"""StableLM (arXiv:2402.17834): Llama with layer norms, partial rotation and, in some, a parallel residual.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): layer_norm_eps, use_qkv_bias;
qk_layernorm: each head of query and key has a norm of its own; use_parallel_residual: attention and feed-forward read
the same norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import ROTARY_FIELDS, LayerNorm
from quire.models.decoder import (
    Biases,
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    ParallelLayer,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class NormOfEachHead(nn.Module):
    """A norm for each head: a module for each, as the files have them."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LayerNorm(size, eps, bias=False) for _ in range(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, H, D] -> [T, H, D]. The heads are put together by torch: such a model's steps are not recorded."""
        return torch.stack([norm(x[:, head]) for head, norm in enumerate(self.norms)], 1)


class StableLmAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            self.q_layernorm = NormOfEachHead(spec.num_heads, spec.head_dim, config.layer_norm_eps)
            self.k_layernorm = NormOfEachHead(spec.num_kv_heads, spec.head_dim, config.layer_norm_eps)

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.q_layernorm(query), self.k_layernorm(key)) if self.has_norms else (query, key)


class StableLmForCausalLM(DecoderForCausalLM):
    turns_partly: ClassVar = True
    attention_class: ClassVar = StableLmAttention
    supported_fields: ClassVar = ROTARY_FIELDS | {"use_qkv_bias", "qk_layernorm", "use_parallel_residual"}

    @classmethod
    def layer(cls, config: PretrainedConfig, layer: int) -> DecoderLayer:
        return (ParallelLayer if config.use_parallel_residual else DecoderLayer)(config, cls, layer)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.use_qkv_bias)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        return LayerNorm(size, config.layer_norm_eps)
