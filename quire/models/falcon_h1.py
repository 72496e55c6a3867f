"""Falcon-H1 (arXiv:2507.22448): attention and a state (Mamba-2) side by side in every layer, and many multipliers.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`) and those of `hybrid.py`:
mamba_d_ssm, mamba_expand, mamba_rms_norm, mamba_norm_before_gate, projectors_bias, attention_bias, mlp_bias, and the
multipliers: embedding_multiplier, lm_head_multiplier, key_multiplier, attention_in_multiplier,
attention_out_multiplier, ssm_in_multiplier, ssm_out_multiplier, ssm_multipliers (of gate, x, B, C, dt),
mlp_multipliers (of gate and result).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.layers import ROTARY_FIELDS, Linear, Mamba2, MambaSpec, MergedLinear, RMSNorm, RotaryTable
from quire.models.base import is_factor, refuse
from quire.models.decoder import Biases, DecoderForCausalLM, DecoderLayer, Multipliers
from quire.models.hybrid import MAMBA_FIELDS, check_mamba, mamba_spec, with_states
from quire.types import AttentionSpec, ForwardContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUMBERS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}


class ScaledMLP(nn.Module):
    """down(silu(gate(x) * multiplier) * up(x)); what down gives is multiplied where it is added."""

    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=biases.mlp)
        self.up_proj = Linear(hidden, inner, bias=biases.mlp)
        self.down_proj = Linear(inner, hidden, bias=biases.mlp)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)
        self.multiplier = float(config.mlp_multipliers[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(kernels.gated_norm(up, gate, gate_scale=self.multiplier))


class FalconH1Layer(DecoderLayer):
    norm_names = ("input_layernorm", "pre_ff_layernorm")

    def __init__(self, config: PretrainedConfig, family: type[DecoderForCausalLM], layer: int) -> None:
        nn.Module.__init__(self)
        biases = family.biases(config)
        self.self_attn = family.attention_class(config, family.attention_spec(config, layer), biases)
        self.mamba = Mamba2(config.hidden_size, falcon_mamba(config))
        self.feed_forward = ScaledMLP(config, biases)
        # The feed-forward's result is multiplied as it is added, by the norm behind it; the other two before.
        self.norms = family.norm(config, config.hidden_size), RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            self.add_module(name, norm)
        self.into_state, self.of_state = float(config.ssm_in_multiplier), float(config.ssm_out_multiplier)
        self.into_attention = float(config.attention_in_multiplier)
        self.of_attention = float(config.attention_out_multiplier)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, rope: RotaryTable | None, ctx: ForwardContext, cache: Any
    ) -> torch.Tensor:
        keys, states = cache
        before_mixers, before_mlp = self.norms
        x = before_mixers(residual, x)
        mixed = _scaled(self.mamba(_scaled(x, self.into_state), ctx, states), self.of_state)
        attended = self.self_attn(_scaled(x, self.into_attention), rope, ctx, keys)
        kernels.add_to(mixed, attended, self.of_attention)
        return self.feed_forward(before_mlp(residual, mixed))


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else kernels.scale(x, factor)


def falcon_mamba(config: PretrainedConfig) -> MambaSpec:
    """What a layer's state is."""
    return mamba_spec(
        config,
        out_bias=bool(config.projectors_bias),
        norm=bool(config.mamba_rms_norm),
        norm_first=bool(config.mamba_norm_before_gate),
        multipliers=tuple(map(float, config.ssm_multipliers)),
    )


class FalconH1ForCausalLM(DecoderForCausalLM):
    supported_fields: ClassVar = (
        ROTARY_FIELDS | MAMBA_FIELDS | set(_NUMBERS) | _LISTS.keys()
        | {"attention_bias", "mlp_bias", "projectors_bias", "mamba_rms_norm", "mamba_norm_before_gate"}
    )  # fmt: skip
    layer_kinds: ClassVar = frozenset({"hybrid"})
    layer_class: ClassVar = FalconH1Layer
    checkpoint_renames = ((r"model\.final_layernorm\.(.+)", r"model.norm.\1"),)

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.kv_spec = with_states(self.kv_spec, falcon_mamba(config), config.num_hidden_layers)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_mamba(config)
        for field in _NUMBERS:
            if not is_factor(getattr(config, field)):
                refuse(config, field, "it must be a finite number")
        for field, count in _LISTS.items():
            given = getattr(config, field)
            fits = isinstance(given, (list, tuple)) and len(given) == count
            if not fits or not all(map(is_factor, given)):
                refuse(config, field, f"it must have {count} finite numbers")

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        """The keys' multiplier is one of the scores too."""
        spec = super().attention_spec(config, layer)
        return dataclasses.replace(spec, window=0, scale=spec.head_dim**-0.5 * config.key_multiplier)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias, mlp=config.mlp_bias)

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(config.embedding_multiplier, config.mlp_multipliers[1], config.lm_head_multiplier)

    def published_names(self, name: str) -> tuple[str, ...]:
        return (re.sub(r"^model\.norm\b", "model.final_layernorm", name),)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[Any]) -> torch.Tensor:
        count = self.kv_spec.num_layers
        return self.model(embeddings, ctx, list(zip(kv[:count], kv[count:], strict=True)))
