"""The shared decoder with multi-head latent attention (arXiv:2405.04434) in the place of its own.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): q_lora_rank (None: queries are
one projection), kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, attention_bias; of YaRN's parameters
mscale and mscale_all_dim, the latter of which scales the scores. num_key_value_heads is num_attention_heads.

The pool keeps kv_lora_rank + qk_rope_head_dim numbers of a token in each layer, whatever the number of heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import huge_pages, kernels
from quire.layers import (
    ROTARY_FIELDS,
    LatentProjection,
    LatentRotary,
    LatentTable,
    Linear,
    MergedLinear,
    PagedAttention,
    RMSNorm,
    RotaryTable,
)
from quire.layers.rotary import rope_parameters
from quire.models.base import refuse
from quire.models.decoder import Biases, DecoderAttention, DecoderForCausalLM
from quire.models.sparse import further_layers
from quire.types import AttentionSpec, ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of the norms of latents, whatever rms_norm_eps is.
_EPS = 1e-6


class LatentAttention(DecoderAttention):
    """Latents for the pool, queries that have absorbed the keys' projection, and the values' after attention."""

    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        nn.Module.__init__(self)
        hidden, heads, rank, shared = config.hidden_size, spec.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
        width = heads * (config.qk_nope_head_dim + shared)
        self.sections = [rank, shared]
        self.split_query = [config.qk_nope_head_dim, shared]
        self.kv_a_proj_with_mqa = Linear(hidden, rank + shared, bias=biases.qkv)
        self.kv_a_layernorm = RMSNorm(rank, _EPS)
        query_layer = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        self.kv_b_proj = LatentProjection(rank, heads, config.qk_nope_head_dim, config.v_head_dim, query_layer)
        self.o_proj = Linear(heads * config.v_head_dim, hidden, bias=biases.out)
        self.attend = PagedAttention.from_spec(spec)
        self.q_a_layernorm: RMSNorm | None = None
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, width, bias=False)
            self.sections = [width, *self.sections]
            self.latents = MergedLinear(self.q_proj, self.kv_a_proj_with_mqa)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=biases.qkv)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _EPS)
            self.q_b_proj = Linear(config.q_lora_rank, width, bias=False)
            self.sections = [config.q_lora_rank, *self.sections]
            self.latents = MergedLinear(self.q_a_proj, self.kv_a_proj_with_mqa)

    def mix(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        assert isinstance(rope, LatentTable)
        query, latent, turning = self.latents(x).split(self.sections, 1)
        if self.q_a_layernorm is not None:
            query = self.q_b_proj(self.q_a_layernorm(query))
        own, own_turning = query.unflatten(1, (-1, sum(self.split_query))).split(self.split_query, 2)
        heads = kernels.join_heads(self.kv_b_proj.queries(own, rope), own_turning)
        key = kernels.join_heads(self.kv_a_layernorm(latent).unsqueeze(1), turning.unsqueeze(1))
        mixed = self.attend.of(heads, key, None, ctx, cache, rope)
        return self.kv_b_proj.outputs(mixed.view(len(x), -1, self.attend.value_dim), rope)


class LatentDecoderForCausalLM(DecoderForCausalLM):
    """A family of such decoders. interleaved: whether neighbours turn together, unless rope_interleave says it."""

    attention_class: ClassVar = LatentAttention
    interleaved: ClassVar[bool] = True
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "attention_bias", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    }  # fmt: skip

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.checkpoint_ignored = (*self.checkpoint_ignored, *further_layers(config))

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_key_value_heads not in (None, config.num_attention_heads):
            refuse(config, "num_key_value_heads", f"it must be num_attention_heads={config.num_attention_heads}")

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        rank, shared = config.kv_lora_rank, config.qk_rope_head_dim
        scale = (config.qk_nope_head_dim + shared) ** -0.5 * _yarn_scale(config)
        return AttentionSpec(config.num_attention_heads, 1, rank + shared, scale, value_dim=rank, latent=True)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[LatentRotary]:
        pairs = bool(config.rope_interleave) if "rope_interleave" in cls.supported_fields else cls.interleaved
        rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
        return (LatentRotary(config, config.num_attention_heads, interleaved=pairs, first=rank, head_dim=turned),)

    def loaded(self) -> None:
        layers = [
            module
            for name, module in self.named_modules()
            if isinstance(module, LatentProjection) and name not in self.elsewhere
        ]
        if not self.derived:
            self.derived = [_memory(layer) for layer in layers]
        for layer, memory in zip(layers, self.derived, strict=True):
            layer.absorb(memory)


def _memory(layer: LatentProjection) -> torch.Tensor:
    """For what a layer's products read beside its weight."""
    weight, shape = layer.weight, layer.turned_shape
    if weight.device.type != "cpu":
        return torch.empty(shape, dtype=weight.dtype, device=weight.device)
    return huge_pages.allocate(math.prod(shape) * weight.element_size()).view(weight.dtype).view(shape)


def _yarn_scale(config: PretrainedConfig) -> float:
    """What mscale_all_dim multiplies the scores by (arXiv:2309.00071)."""
    parameters = rope_parameters(config)
    factor, size = parameters.get("factor") or 1.0, parameters.get("mscale_all_dim") or 0.0
    if parameters["rope_type"] == "default" or factor <= 1.0:
        return 1.0
    scale: float = (0.1 * size * math.log(factor) + 1.0) ** 2
    return scale
