"""Hugging Face's activation names, and the kernels that compute them.

gpt-oss's is `kernels.clamped_swiglu`: it has no name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.errors import UnsupportedModelError

# Several names stand for one function, up to the last digits of its constants.
KERNEL_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
    "relu6": "relu6",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "mish": "mish",
}


class XIELU(nn.Module):
    """xIELU (arXiv:2411.13010), whose numbers are trained; named as transformers' is, `act_fn` in Apertus."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("alpha_p", "alpha_n"):
            self.register_parameter(name, nn.Parameter(torch.empty(1), requires_grad=False))
        for name in ("beta", "eps"):
            self.register_buffer(name, torch.empty((), dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        parameters: Any = self._parameters
        buffers: Any = self._buffers
        return kernels.xielu(
            x, parameters["alpha_p"], parameters["alpha_n"], buffers["beta"].view(1), buffers["eps"].view(1)
        )


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return f for x [T, C] -> act(x) [T, C]: a function, or a module where there are weights to load.

    Raises UnsupportedModelError for an unknown name, and for one with weights that quire does not load.
    """
    if name == "xielu":
        return XIELU()
    if name in KERNEL_KINDS:
        kind = KERNEL_KINDS[name]
        return lambda x: kernels.activation(x, kind)
    return _elementwise(name)


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return f for x [T, 2 C] -> act(x[:, :C]) * x[:, C:] [T, C]. Raises UnsupportedModelError as above."""
    if name in KERNEL_KINDS:
        kind = KERNEL_KINDS[name]
        return lambda x: kernels.activation_and_mul(x, kind)
    function = _elementwise(name)

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return gated


@cache
def _elementwise(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Transformers' own function of that name, if it has no parameters to load."""
    from transformers.activations import ACT2FN  # only here: this import takes a second

    if name not in ACT2FN:
        raise UnsupportedModelError(
            f"config.json: the activation {name!r} is not known to quire or transformers. Known: "
            f"{', '.join(sorted(ACT2FN))}."
        )
    with torch.device("cpu"):
        function = ACT2FN[name]
    if any(True for _ in function.parameters()) or any(True for _ in function.buffers()):
        raise UnsupportedModelError(f"Activation {name!r} has weights of its own, which quire does not load.")

    def by_row(x: torch.Tensor) -> torch.Tensor:
        # torch treats the last few elements of a call otherwise than the rest, and not to the same bit. Token
        # by token, each in memory of its own, a result cannot depend on what shares the batch.
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for row, result in zip(x, out, strict=True):
            result.copy_(function(row.clone()))
        return out

    return by_row
