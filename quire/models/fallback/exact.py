"""Functions of torch's that do not treat tokens one by one to the last bit, done so that they do.

A module that calls some of them runs within this mode; the others do not pay for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from quire import kernels

# Functions that kernels compute, by the kernel's name for them.
_KINDS = {
    F.silu: "silu", torch.sigmoid: "sigmoid", torch.Tensor.sigmoid: "sigmoid", F.sigmoid: "sigmoid",
    torch.tanh: "tanh", torch.Tensor.tanh: "tanh", F.tanh: "tanh", F.mish: "mish", torch._C._nn.silu: "silu",
    torch.special.expit: "sigmoid",
}  # fmt: skip
# Others, element by element: done row by row.
_BY_ROW = frozenset({
    torch.exp, torch.Tensor.exp, torch.exp2, torch.Tensor.exp2, torch.expm1, torch.Tensor.expm1, torch.log,
    torch.Tensor.log, torch.log1p, torch.Tensor.log1p, torch.log2, torch.Tensor.log2, torch.erf, torch.Tensor.erf,
    torch.sin, torch.Tensor.sin, torch.cos, torch.Tensor.cos, torch.pow, torch.Tensor.pow, torch.Tensor.__pow__,
    F.softplus, F.elu, F.selu, F.celu, F.logsigmoid, torch.Tensor.log10, torch.log10, torch.Tensor.__rpow__, F.softsign,
    torch.Tensor.atan, torch.atan, torch.lerp, torch.Tensor.lerp, torch.addcmul, torch.Tensor.addcmul,
})  # fmt: skip
PRODUCTS = frozenset({
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm, F.linear,
})  # fmt: skip
_TIMES = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__})
_EXACT_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)


class RowExact(TorchFunctionMode):
    """Such functions are done row by row, or by kernels."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        done = self._done(func, args, kwargs)
        return func(*args, **kwargs) if done is None else done

    def _done(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The result, of what is not left to torch."""
        if func in _KINDS and not kwargs.get("inplace"):
            return _activation(args[0], _KINDS[func])
        if func is F.gelu:
            approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
            return _activation(args[0], "gelu_tanh" if approximate == "tanh" else "gelu")
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in PRODUCTS:
            return _product(*args)
        if func in _TIMES and len(args) == 2:
            return _complex_product(*args)
        if func in _BY_ROW:
            powers = getattr(func, "__name__", "").strip("_") == "pow"
            if powers and len(args) > 1 and args[1] in _EXACT_POWERS:
                return None
            return _by_row(func, args, kwargs)
        return None


def _activation(x: torch.Tensor, kind: str) -> torch.Tensor | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if x.dim() == 0 or x.numel() == 0:
        return None
    return kernels.activation(x.reshape(-1, x.shape[-1]).contiguous(), kind).view(x.shape)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if weight.dim() != 2 or x.dtype is not weight.dtype:
        return None
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y = kernels.linear(flat, (weight.contiguous(),), (None if bias is None else bias.contiguous(),))
    return y.view(*x.shape[:-1], weight.shape[0])


def _product(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """x [..., K] times a matrix [K, N]: a product with a weight, if the matrix is about no token."""
    if x.shape[-1] == 1 or other.dim() != 2 or x.dim() < 2 or x.dtype is not other.dtype:
        return None
    return _linear(x, other.t())


def _complex_product(x: Any, other: Any) -> torch.Tensor | None:
    if not (isinstance(x, torch.Tensor) and isinstance(other, torch.Tensor) and x.is_complex() and other.is_complex()):
        return None
    real = x.real * other.real - x.imag * other.imag
    return torch.complex(real, x.real * other.imag + x.imag * other.real)


def _by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Row by row, each in memory of its own: what shares the call cannot show."""
    x = args[0]
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
        return None
    if any(isinstance(one, torch.Tensor) for one in (*args[1:], *kwargs.values())):
        shaped = torch.broadcast_tensors(*(one for one in args if isinstance(one, torch.Tensor)))
        if len(shaped) != len(args) or kwargs:
            return None
        rows = [one.reshape(-1, one.shape[-1]) for one in shaped]
        out = torch.stack([func(*(one.clone() for one in row)) for row in zip(*rows, strict=True)])
        return out.view(shaped[0].shape)
    out = torch.stack([func(row.clone(), *args[1:], **kwargs) for row in x.reshape(-1, x.shape[-1])])
    return out.view(x.shape)
