"""Hugging Face's activation names, and the kernels that compute them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

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
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return f for x [T, C] -> act(x) [T, C]. Raises UnsupportedModelError for an unknown name."""
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
            f"Activation {name!r} is not known to quire or transformers. Known: {', '.join(sorted(ACT2FN))}."
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
