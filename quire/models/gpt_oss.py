"""gpt-oss (arXiv:2508.10925): attention with sinks, and experts with biases and a cut-off activation.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections, sliding_window in the layers that layer_types calls sliding, num_local_experts, num_experts_per_tok,
swiglu_alpha, swiglu_limit. A token's experts are those of the largest logits, and its shares their softmax.

The published files have the experts' weights in MXFP4 (OCP Microscaling Formats 1.0): see `quantization/mxfp4.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.checkpoint.weights import StoredPart
from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS, Experts, RotaryTable, Router
from quire.models.decoder import WINDOW_FIELDS, Biases, DecoderAttention
from quire.models.sparse import SparseDecoderForCausalLM
from quire.types import ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class GptOssAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads), requires_grad=False)

    def mix(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        query, key, value = self.project(x)
        return self.attend.of(query, key, value, ctx, cache, rope, self.sinks)


class GptOssMLP(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        activation = partial(kernels.clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
        routing = Routing("softmax_of_chosen")
        self.router = Router(hidden, count)
        self.experts = Experts(
            count, config.num_experts_per_tok, hidden, inner, routing, activation, bias=True, interleaved=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.router(x, torch.float32))


class GptOssForCausalLM(SparseDecoderForCausalLM):
    attention_class: ClassVar = GptOssAttention
    supported_fields: ClassVar = ROTARY_FIELDS | WINDOW_FIELDS | {"attention_bias"}

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        return dataclasses.replace(super().attention_spec(config, layer), sinks=True)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        return GptOssMLP(config)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        """The files have gate_up_proj, of each expert a gate's column and then an up's, and down_proj, with biases."""
        config, parts = self.config, {}
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}.mlp.experts"
            for stored, features, columns, leaves in (
                ("gate_up_proj", hidden, 2 * inner, ("gate_proj", "up_proj")),
                ("down_proj", inner, hidden, ("down_proj",)),
            ):
                weight = {f"{path}.{stored}": torch.Size((count, features, columns))}
                bias = {f"{path}.{stored}_bias": torch.Size((count, columns))}
                for e in range(count):
                    for first, leaf in enumerate(leaves):
                        own = (e, first, len(leaves))
                        parts[f"{path}.{e}.{leaf}.weight"] = StoredPart(weight, partial(_transposed, *own))
                        parts[f"{path}.{e}.{leaf}.bias"] = StoredPart(bias, partial(_some, *own))
        return parts


def _some(expert: int, first: int, step: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, first::step]


def _transposed(expert: int, first: int, step: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, :, first::step].t()
