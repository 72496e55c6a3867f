"""Layers with a state instead of keys: Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.layers.linear import Linear
from quire.types import ForwardContext, StateCache, StateSpec


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """What one layer computes.

    num_heads, head_dim, state_size, groups, kernel: of the state, of B and C, and of the convolution. proj_bias,
    out_bias, conv_bias: which of its weights come with a bias. norm: whether there is one before the last projection,
    over groups of channels, with `eps`; norm_first: before the gate's product. dt_limits: of the step's size.
    multipliers: of the first projection's parts: gate, x, B, C, dt.
    """

    num_heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    eps: float
    proj_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    norm_first: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def state(self) -> StateSpec:
        """What it keeps of a sequence."""
        channels = self.inner + 2 * self.groups * self.state_size
        return StateSpec(self.num_heads, self.head_dim, self.state_size, channels, self.kernel)


class Mamba2(nn.Module):
    """Project, convolve, scan, gate and norm, project. Its parts are named as transformers' are."""

    def __init__(self, hidden: int, spec: MambaSpec) -> None:
        super().__init__()
        state = spec.state
        self.spec = spec
        self.in_proj = Linear(hidden, spec.inner + state.channels + spec.num_heads, bias=spec.proj_bias)
        self.conv1d = ConvWeights(state.channels, spec.kernel, spec.conv_bias)
        for name in ("dt_bias", "A_log", "D"):
            self.register_parameter(name, nn.Parameter(torch.empty(spec.num_heads), requires_grad=False))
        self.norm = GateNorm(spec.inner) if spec.norm else None
        self.out_proj = Linear(spec.inner, hidden, bias=spec.out_bias)
        sizes = spec.inner, spec.groups * spec.state_size, spec.groups * spec.state_size
        self._scales = _Scales(spec.multipliers[1:4], sizes)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, cache: StateCache) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        spec = self.spec
        parts = self.in_proj(x).split([spec.inner, spec.state.channels, spec.num_heads], 1)
        y = self.scan(parts[1], parts[2], ctx, cache)
        own: Any = None if self.norm is None else self.norm._parameters
        weight = None if own is None else own["weight"]
        y = kernels.gated_norm(y, parts[0], weight, spec.groups, spec.eps, spec.multipliers[0], spec.norm_first)
        return self.out_proj(y)

    def scan(self, x: torch.Tensor, dt: torch.Tensor, ctx: ForwardContext, cache: StateCache) -> torch.Tensor:
        """x: [T, channels], dt: [T, num_heads], parts of a projection -> [T, inner]."""
        spec, own = self.spec, self._parameters
        conv: Any = self.conv1d._parameters
        a_log: Any = own["A_log"]
        dt_bias: Any = own["dt_bias"]
        d: Any = own["D"]
        table = ctx.table_of(cache.group)
        past = table, ctx.query_start, ctx.context_len, cache.block_size
        x = kernels.causal_conv1d(
            x, conv["weight"].view(-1, spec.kernel), conv["bias"], self._scales.on(x.device), cache.tails,
            cache.tail_ends, *past,
        )  # fmt: skip
        return kernels.selective_scan(
            x, dt, a_log, dt_bias, d, cache.states, cache.state_ends, *past, spec.groups, spec.multipliers[4],
            *spec.dt_limits,
        )  # fmt: skip


class ConvWeights(nn.Module):
    """The weights of a convolution of each channel by itself: weight [C, 1, K], bias [C]. Adapters do not change it."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.register_parameter("weight", _parameter(channels, 1, kernel))
        self.register_parameter("bias", _parameter(channels) if bias else None)


class GateNorm(nn.Module):
    """The weight [C] of the norm of a gated result. Adapters do not change it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_parameter("weight", _parameter(size))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class _Scales:
    """A number for each channel, on whatever device it is asked for. Recorded steps know it by its address."""

    def __init__(self, scales: Sequence[float], sizes: Sequence[int]) -> None:
        self._scales = scales
        self._sizes = sizes
        self._tensors: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor | None:
        """[C] float32, or None where all are 1."""
        if all(scale == 1.0 for scale in self._scales):
            return None
        tensor = self._tensors.get(device)
        if tensor is None:
            pairs = zip(self._scales, self._sizes, strict=True)
            tensor = self._tensors[device] = torch.cat([torch.full((n,), scale, device=device) for scale, n in pairs])
        return tensor
