"""The feed-forwards that decoder layers have: SwiGLU's gate (arXiv:2002.05202), or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from quire.layers import Linear, MergedLinear, activation, gated_activation

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Biases(NamedTuple):
    """Which of a layer's projections have a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); inner: its width, by default the configuration's intermediate_size."""

    def __init__(self, config: PretrainedConfig, biases: Biases, inner: int | None = None) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=biases.mlp)
        self.up_proj = Linear(hidden, inner, bias=biases.mlp)
        self.down_proj = Linear(inner, hidden, bias=biases.mlp)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)
        self.activate = gated_activation(hidden_act(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_up(x)))


class FusedGatedMLP(nn.Module):
    """The same with gate and up as one layer, `gate_up_proj`: the gate first."""

    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=biases.mlp)
        self.down_proj = Linear(inner, hidden, bias=biases.mlp)
        self.activate = gated_activation(hidden_act(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_up_proj(x)))


class PlainMLP(nn.Module):
    """down(act(up(x)))"""

    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=biases.mlp)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=biases.mlp)
        self.activate = activation(hidden_act(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.up_proj(x)))


def hidden_act(config: PretrainedConfig) -> str:
    """The feed-forward's activation: Gemma's configurations have it under a name of their own."""
    return getattr(config, "hidden_activation", None) or config.hidden_act
