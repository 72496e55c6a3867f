"""Which of a module's parts quire's layers can stand for: asked of what they compute, not of what they are called."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from quire.layers.activation import KERNEL_KINDS
from quire.models.fallback.parts import (
    Activation,
    FlatEmbedding,
    FlatLayerNorm,
    FlatLinear,
    FlatRMSNorm,
    Head,
)

Make = Callable[[], nn.Module]
_LARGEST_EPS = 1e-2
_CLOSE = 2e-6


def choose(module: nn.Module, head: nn.Module) -> Make | None:
    """What makes the layer of quire's that computes the same as a part of transformers' module; None: there is none."""
    if module is head:
        return _linear(module, Head)
    return _linear(module, FlatLinear) or _table(module) or _activation(module) or _norm(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer whose weight is [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def _linear(module: Any, kind: type[FlatLinear]) -> Make | None:
    if is_conv1d(module):
        return lambda: kind(module.nx, module.nf, bias=True)
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return lambda: kind(module.in_features, module.out_features, module.bias is not None)
    return None


def _table(module: Any) -> Make | None:
    """Of an embedding, also one that multiplies by `embed_scale`."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    count, size = module.weight.shape
    if type(module).forward is nn.Embedding.forward:
        return lambda: FlatEmbedding(count, size)
    factor = getattr(module, "embed_scale", None)
    if factor is None or set(inspect.signature(module.forward).parameters) != {"input_ids"}:
        return None
    number = torch.as_tensor(factor)
    if number.is_meta or number.numel() != 1 or not _scales(type(module), float(number)):
        return None
    return lambda: FlatEmbedding(count, size, number)


def _scales(kind: Any, factor: float) -> bool:
    """Whether such a table gives its rows times the factor."""
    with torch.device("cpu"), torch.inference_mode():
        try:
            small = kind(7, 4, 0, embed_scale=factor)
        except TypeError:
            return False
        ids = torch.tensor([[3, 1, 4]])
        return bool(torch.equal(small(ids), small.weight[ids] * factor))


@cache
def _kinds() -> dict[type, list[tuple[dict[str, Any], str]]]:
    """Transformers' activations by their class, with what makes them differ within it."""
    from transformers.activations import ACT2FN

    found: dict[type, list[tuple[dict[str, Any], str]]] = {}
    for name, kind in KERNEL_KINDS.items():
        if name in ACT2FN:
            made = ACT2FN[name]
            found.setdefault(type(made), []).append((_own(made), kind))
    return found


def _own(module: nn.Module) -> dict[str, Any]:
    """What a module has of its own: numbers, texts and functions."""
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: getattr(value, "__func__", value) for name, value in plain.items()}


def activation_kind(module: object) -> str | None:
    """The kernels' name for what one of transformers' activations computes."""
    if not isinstance(module, nn.Module):
        return None
    return next((kind for own, kind in _kinds().get(type(module), ()) if own == _own(module)), None)


def _activation(module: nn.Module) -> Make | None:
    kind = activation_kind(module)
    return None if kind is None else lambda: Activation(kind)


def _norm(module: Any) -> Make | None:
    """Of a part with a vector of weights at most, which does to rows what one of the norms does."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if not set(shapes) <= {"weight", "bias"} or any(len(shape) != 1 for shape in shapes.values()):
        return None
    if any(True for _ in module.children()) or any(True for _ in module.buffers()) or not _takes_one(module):
        return None
    size = next(iter(shapes.values()))[0] if shapes else _size_of(module)
    eps = _eps_of(module)
    if size is None or eps is None:
        return None
    for make in _norms_like(size, eps, shapes):
        if _same(module, make, size, shapes):
            return make
    return None


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _size_of(module: nn.Module) -> int | None:
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)):
        return int(shape[0]) if len(shape) == 1 else None
    return 64 if _eps_of(module) is not None else None  # it has no weight: any size shows what it does


def _eps_of(module: nn.Module) -> float | None:
    found = [value for value in vars(module).values() if isinstance(value, float) and 0 < value <= _LARGEST_EPS]
    return found[0] if len(found) == 1 else None


def _norms_like(size: int, eps: float, shapes: dict[str, Any]) -> list[Make]:
    weight, bias = "weight" in shapes, "bias" in shapes
    found: list[Make] = []
    if not bias:
        found += [lambda: FlatRMSNorm(size, eps, affine=weight)]
        found += [lambda: FlatRMSNorm(size, eps, weight_offset=1.0)] if weight else []
    found += [lambda: FlatLayerNorm(size, eps, affine=weight, bias=bias)]
    found += [lambda: FlatLayerNorm(size, eps, affine=weight, bias=bias, weight_offset=1.0)] if weight else []
    return found


def _same(module: nn.Module, make: Make, size: int, shapes: dict[str, Any]) -> bool:
    """Whether both give the same of rows that are large, small and about as small as eps."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    theirs = copy.deepcopy(module)
    with torch.device("cpu"):
        ours = make()
    for name in shapes:
        numbers = nn.Parameter(draw(size), requires_grad=False)
        theirs.register_parameter(name, numbers)
        ours.register_parameter(name, numbers)
    rows = draw(6, size) * torch.tensor([1.0, 30.0, 1e-2, 1e-3, 1e-4, 3.0], device="cpu").unsqueeze(1) + 0.25 * draw(
        6, 1
    )
    rows[3:5] -= rows[3:5].mean(-1, keepdim=True)
    with torch.inference_mode():
        try:
            want = theirs(rows.unsqueeze(0))
        except Exception:  # whatever it is, it is no norm of rows
            return False
        got = ours(rows.unsqueeze(0))
    return isinstance(want, torch.Tensor) and want.shape == got.shape and torch.allclose(want, got, _CLOSE, _CLOSE)
