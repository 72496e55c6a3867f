"""What of quantized models a device does not serve: said when a model is loaded, before its weights are read."""

from __future__ import annotations

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import Linear
from quire.layers.experts import Experts
from quire.layers.quantization import QuantizedRows


def check_device(model: nn.Module, device: torch.device) -> None:
    """Raise UnsupportedModelError where a model's formats are not those of a device's kernels.

    A GPU's host does not know how many rows an expert has, so that experts have products of their own there
    (csrc/cuda/experts): of rows of floats.
    """
    if device.type in ("cpu", "meta"):
        return
    for path, experts in model.named_modules():
        if not isinstance(experts, Experts):
            continue
        for name, layer in experts.named_modules():
            if isinstance(layer, Linear) and isinstance(layer.format, QuantizedRows):
                raise UnsupportedModelError(
                    f"{path}.{name}: experts' weights of {layer.format.layout.kind.name} have no kernels on a GPU. Run "
                    "the model with device='cpu', or take a checkpoint whose experts are of 16 bits."
                )
