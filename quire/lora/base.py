"""What adapters are bound to: a model's modules and parameters as they were loaded, be they floats or quantized."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers import Embedding, Linear, Router
from quire.models.base import CausalLM

_PIECE = 1 << 22  # elements of a weight that are compared at a time


class Base:
    """The base model. Quantized weights count with the shape and the numbers that they stand for.

    modules: by name. parameters: by module, each one's own, by leaf name: while an image is encoded, a tower's modules
    may have an adapter's for a moment.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = {name: dict(module._parameters) for name, module in self.modules.items()}

    def parameter(self, own: str) -> nn.Parameter:
        name, _, leaf = own.rpartition(".")
        parameter: nn.Parameter | None = self.parameters[name][leaf]
        assert parameter is not None
        return parameter

    def shape(self, own: str) -> torch.Size:
        """Of a parameter, as a checkpoint of floats has it."""
        module = self.modules[own.rpartition(".")[0]]
        if own.endswith(".weight") and isinstance(module, Linear):
            return torch.Size((module.out_features, module.in_features))
        if own.endswith(".weight") and isinstance(module, Embedding):
            return torch.Size((module.num_embeddings, module.size))
        return self.parameter(own).shape

    def dtype_of(self, own: str) -> torch.dtype:
        """Of what stands in the place of a parameter."""
        parameter = self.parameter(own)
        return parameter.dtype if parameter.is_floating_point() else self.dtype_for(own.rpartition(".")[0])

    def dtype_for(self, name: str) -> torch.dtype:
        """Of what is multiplied by the weights of the module of this name."""
        return adapter_dtype(self.model, name, self.modules[name])

    def equals(self, own: str, tensor: torch.Tensor) -> bool:
        """Whether a parameter has the numbers of `tensor`, which is of its shape and of `dtype_of`."""
        parameter = self.parameter(own)
        if parameter.is_floating_point() and parameter.shape == tensor.shape:  # else packed, or quantized
            return torch.equal(tensor.to(parameter.device), parameter)
        module = self.modules[own.rpartition(".")[0]]
        step = max(1, _PIECE // max(1, tensor.shape[1]))
        for at in range(0, len(tensor), step):
            end = min(at + step, len(tensor))
            if isinstance(module, Linear):
                rows = module.format.rows(module, at, end)
            else:
                assert isinstance(module, Embedding)
                rows = module.rows(at, end)
            if not torch.equal(tensor[at:end].to(rows.device), rows.to(tensor.dtype)):
                return False
        return True


def adapter_dtype(model: CausalLM, name: str, module: nn.Module) -> torch.dtype:
    """Of what adapters add in a module: the model's, or float32 in a router of float32, however that is stored."""
    return torch.float32 if isinstance(module, Router) and model.keeps_float32(f"{name}.weight") else model.dtype
