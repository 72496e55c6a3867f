"""gpt-oss (arXiv:2508.10925): attention with sinks, and experts with biases and a cut-off activation.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): attention_bias, of all four
projections, sliding_window in the layers that layer_types calls sliding, num_local_experts, num_experts_per_tok,
swiglu_alpha, swiglu_limit. A token's experts are those of the largest logits, and its shares their softmax.

The published files have the experts' weights in MXFP4 (OCP Microscaling Formats 1.0): numbers of four bits, of which 32
share a power of two. They become floats when they are loaded, exactly: a gpt-oss-20b takes 42 GB in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.checkpoint.weights import StoredPart
from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS, Experts, RotaryTable, Router
from quire.models.base import refuse
from quire.models.decoder import WINDOW_FIELDS, Biases, DecoderAttention
from quire.models.sparse import SparseDecoderForCausalLM
from quire.types import ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec

_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and, from 8 on, the same below zero
_SHARED = 32  # numbers that have one power of two


class GptOssAttention(DecoderAttention):
    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads), requires_grad=False)

    def forward(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        query, key, value = self.project(x)
        return self.o_proj(self.attend.of(query, key, value, ctx, cache, rope, self.sinks))


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
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if not _is_packed(config):
            return
        for field in ("hidden_size", "intermediate_size"):
            if getattr(config, field) % _SHARED:
                refuse(config, field, f"{_SHARED} numbers of MXFP4 share a power of two: it must be a multiple")

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
        packed = _is_packed(config)
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}.mlp.experts"
            for stored, features, columns, leaves in (
                ("gate_up_proj", hidden, 2 * inner, ("gate_proj", "up_proj")),
                ("down_proj", inner, hidden, ("down_proj",)),
            ):
                bias = {f"{path}.{stored}_bias": torch.Size((count, columns))}
                shapes, make = _packed(path, stored, count, features, columns) if packed else (
                    {f"{path}.{stored}": torch.Size((count, features, columns))}, _transposed,
                )  # fmt: skip
                dtypes = dict.fromkeys(shapes, (torch.uint8,)) if packed else {}
                for e in range(count):
                    for first, leaf in enumerate(leaves):
                        own = (e, first, len(leaves))
                        parts[f"{path}.{e}.{leaf}.weight"] = StoredPart(shapes, partial(make, *own), dtypes)
                        parts[f"{path}.{e}.{leaf}.bias"] = StoredPart(bias, partial(_some, *own))
        return parts


def _is_packed(config: PretrainedConfig) -> bool:
    """Whether the files have the experts' weights as they were published; GGUF files have them in rows of their own."""
    settings = getattr(config, "quantization_config", None)
    return bool(settings) and (not isinstance(settings, dict) or settings.get("quant_method") == "mxfp4")


def _packed(
    path: str, stored: str, count: int, features: int, columns: int
) -> tuple[dict[str, torch.Size], Callable[..., torch.Tensor]]:
    groups = features // _SHARED
    blocks, scales = torch.Size((count, columns, groups, _SHARED // 2)), torch.Size((count, columns, groups))
    return {f"{path}.{stored}_blocks": blocks, f"{path}.{stored}_scales": scales}, _unpacked


def _some(expert: int, first: int, step: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, first::step]


def _transposed(expert: int, first: int, step: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, :, first::step].t()


def _unpacked(expert: int, first: int, step: int, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks: [E, N, K / 32, 16] bytes, the lower four bits first; scales: [E, N, K / 32], exponents above -127."""
    numbers = torch.tensor([*_FOUR_BITS, *(-one for one in _FOUR_BITS)])
    own = blocks[expert, first::step].int()
    values = torch.stack([numbers[own & 15], numbers[own >> 4]], -1).flatten(-2)
    exponents = scales[expert, first::step].int() - 127
    return torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
