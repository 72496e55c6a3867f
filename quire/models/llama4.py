"""Llama 4's text models (Meta, 2025): chunks of attention where layers rotate, and experts that one token in each goes
through.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): no_rope_layers (for each layer
1 where it rotates, and 0); attention_chunk_size, in the layers that layer_types calls chunked: a token sees the keys of
its own chunk; use_qk_norm: in the layers that rotate, query and key are divided by their size, then;
attn_temperature_tuning, floor_scale and attn_scale: in the others, queries grow with their position. moe_layers (or
interleave_moe_layer_step): which layers have experts, num_local_experts; intermediate_size is that of an expert,
intermediate_size_mlp that of the other layers; attention_bias, of all four projections.

Published checkpoints are Llama4ForConditionalGeneration. Their text model is served alone: images are refused, and the
tensors that are theirs are not loaded. For text, it is the whole computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.checkpoint.weights import StoredPart
from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS, Experts, PositionFactors, RMSNorm, RotaryEmbedding, RotaryTable, Router
from quire.models.base import is_factor, refuse
from quire.models.decoder import Biases, DecoderAttention, GatedMLP, hidden_act
from quire.models.sparse import SparseDecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec, ForwardContext, KVCache

_CHUNKED = "chunked_attention"


class Llama4Attention(DecoderAttention):
    """factors: of queries, where the layer does not rotate; or None."""

    factors: PositionFactors | None = None

    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.qk_norm = RMSNorm(spec.head_dim, config.rms_norm_eps, affine=False) if config.use_qk_norm else None

    def mix(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        query, key, value = self.project(x)
        if rope is None:
            if self.factors is not None:
                query = kernels.multiply_rows(query.view(len(x), -1), self.factors(ctx)).view(query.shape)
            return self.attend.of(query, key, value, ctx, cache)
        self.attend.rotate(query, key, rope)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query), self.qk_norm(key)
        return self.attend.of(query, key, value, ctx, cache)


class Llama4MoE(nn.Module):
    """A token's expert is given the token times the logistic function of its logit. All go through shared_expert."""

    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        hidden, count, inner = config.hidden_size, config.num_local_experts, config.intermediate_size
        routing = Routing("sigmoid_of_chosen")
        self.router = Router(hidden, count, bias=False)
        self.experts = Experts(count, 1, hidden, inner, routing, hidden_act(config), scales_inputs=True)
        self.shared_expert = GatedMLP(config, biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.router(x, torch.float32), shared=self.shared_expert(x))


class Llama4ForCausalLM(SparseDecoderForCausalLM):
    attention_class: ClassVar = Llama4Attention
    layer_kinds: ClassVar = frozenset({"full_attention", _CHUNKED})
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "attention_bias", "attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale", "layer_types",
        "no_rope_layer_interval", "no_rope_layers", "use_qk_norm",
    }  # fmt: skip
    # The experts' tensors are parts of what the files have, and keep the names that they have there.
    checkpoint_renames: Sequence[tuple[str, str]] = (
        (r"(model\.layers\.\d+)\.feed_forward\.(?!experts\.)(.+)", r"\1.mlp.\2"),
    )
    old_names = ((r"\.mlp\b", ".feed_forward"),)
    new_names = old_names
    stored_prefix: ClassVar = ""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if config.attn_temperature_tuning:
            factors = PositionFactors(config.floor_scale, config.attn_scale, 1, self.max_model_len)
            for module in self.modules():
                if isinstance(module, Llama4Attention):
                    module.factors = factors

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_experts_per_tok != 1:
            refuse(config, "num_experts_per_tok", "a token goes through one expert")
        if len(config.no_rope_layers) < config.num_hidden_layers:
            refuse(config, "no_rope_layers", "it must have a number for each layer")
        size = config.attention_chunk_size
        if _CHUNKED in config.layer_types and not (type(size) is int and size >= 1):
            refuse(config, "attention_chunk_size", "layer_types has chunked layers, and it must be a number from 1")
        for field in ("floor_scale", "attn_scale") if config.attn_temperature_tuning else ():
            if not is_factor(getattr(config, field)):  # null: what numbers must be, all models check
                refuse(config, field, "attn_temperature_tuning is set, and it must be a number")

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        chunk = config.attention_chunk_size if config.layer_types[layer] == _CHUNKED else 0
        return dataclasses.replace(super().attention_spec(config, layer), chunk=chunk)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, interleaved=True),)

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        return 0 if config.no_rope_layers[layer] else -1

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if layer in config.moe_layers:
            return Llama4MoE(config, biases)
        return GatedMLP(config, biases, config.intermediate_size_mlp)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        """The files have gate_up_proj [E, H, 2 I], of each expert gate and then up, and down_proj [E, I, H]."""
        config, parts = self.config, {}
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        for layer in config.moe_layers:
            stored, own = f"{self.stored_prefix}model.layers.{layer}.feed_forward.experts", f"model.layers.{layer}.mlp"
            gate_up = {f"{stored}.gate_up_proj": torch.Size((count, hidden, 2 * inner))}
            down = {f"{stored}.down_proj": torch.Size((count, inner, hidden))}
            for e in range(count):
                leaves = (("gate_proj", gate_up, 0, inner), ("up_proj", gate_up, inner, 2 * inner),
                          ("down_proj", down, 0, hidden))  # fmt: skip
                for leaf, tensor, first, end in leaves:
                    parts[f"{own}.experts.{e}.{leaf}.weight"] = StoredPart(tensor, partial(_columns, e, first, end))
        return parts


def _columns(expert: int, first: int, end: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, :, first:end].t()


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    checkpoint_renames = (
        (r"language_model\.(model\.layers\.\d+)\.feed_forward\.(?!experts\.)(.+)", r"\1.mlp.\2"),
        (r"language_model\.((?!.*\.experts\.).+)", r"\1"),
    )
    checkpoint_ignored = (*Llama4ForCausalLM.checkpoint_ignored, r"(vision_model|multi_modal_projector)\..+")
    stored_prefix: ClassVar = "language_model."

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.text_config)

    def published_names(self, name: str) -> tuple[str, ...]:
        return tuple(f"language_model.{one}" for one in super().published_names(name))
