"""What towers' layers are made of: parts of transformers' modules on quire's kernels, under the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.errors import UnsupportedModelError
from quire.layers import LayerNorm, Linear, MergedLinear, RMSNorm, activation, gated_activation


def own_norm(norm: Any) -> RMSNorm | LayerNorm:
    """Quire's layer for one of torch's or transformers', with its parameters. Raises UnsupportedModelError."""
    own: RMSNorm | LayerNorm
    if isinstance(norm, nn.LayerNorm):
        own = LayerNorm(norm.normalized_shape[0], norm.eps, bias=norm.bias is not None)
    elif hasattr(norm, "variance_epsilon") and set(norm._parameters) == {"weight"}:
        own = RMSNorm(norm.weight.shape[0], norm.variance_epsilon)
    else:
        raise UnsupportedModelError(f"{type(norm).__name__} is no norm of a tower that quire knows.")
    own._parameters.update(norm._parameters)
    return own


class PatchProduct(nn.Module):
    """A convolution over one patch of its own size: a product. It keeps the convolution's parameters as they are:
    adapters replace them while an image is encoded."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self._parameters.update(convolution._parameters)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """patches: [T, channels, ...] of one patch each -> [T, C]."""
        parameters: Any = self._parameters
        return kernels.linear(patches.flatten(1), (parameters["weight"].flatten(1),), (parameters["bias"],))


class PatchConvolution(PatchProduct):
    """A convolution over whole images whose stride is its size."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels: [N, channels, height, width] -> [N, C, rows, columns] of whole patches."""
        parameters: Any = self._parameters
        high, wide = parameters["weight"].shape[2:]
        rows, columns = pixels.shape[2] // high, pixels.shape[3] // wide
        grid = pixels[:, :, : rows * high, : columns * wide].unflatten(3, (columns, wide)).unflatten(2, (rows, high))
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)  # of [N, channels, rows, high, columns, wide]
        return super().forward(patches).view(len(pixels), rows, columns, -1).permute(0, 3, 1, 2)


class _GatedFeedForward(nn.Module):
    def __init__(self, mlp: Any, hidden_act: str) -> None:
        super().__init__()
        self.gate_proj: Linear = mlp.gate_proj
        self.up_proj: Linear = mlp.up_proj
        self.down_proj: Linear = mlp.down_proj
        self._gate_and_up = MergedLinear(mlp.gate_proj, mlp.up_proj)
        self._activate = gated_activation(hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activate(self._gate_and_up(x)))


class _FeedForward(nn.Module):
    """Its two products are called otherwise in each family."""

    def __init__(self, mlp: Any, names: tuple[str, str], hidden_act: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, getattr(mlp, name))
        self._names = names
        self._activate = activation(hidden_act)
        if isinstance(self._activate, nn.Module):
            raise UnsupportedModelError(f"vision_config.hidden_act={hidden_act!r}: it has weights of its own.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self._modules[name] for name in self._names)
        assert first is not None and second is not None
        return second(self._activate(first(x)))


def feed_forward(mlp: Any, hidden_act: str) -> nn.Module:
    """Quire's for one of transformers', with its linear layers. Raises UnsupportedModelError."""
    parts = {name for name, child in mlp.named_children() if isinstance(child, Linear)}
    if parts == {"gate_proj", "up_proj", "down_proj"}:
        return _GatedFeedForward(mlp, hidden_act)
    for names in (("fc1", "fc2"), ("linear_fc1", "linear_fc2")):
        if parts == {*names}:
            return _FeedForward(mlp, names, hidden_act)
    raise UnsupportedModelError(f"{type(mlp).__name__} has the products {sorted(parts)}, which quire does not know.")
