"""Transformers' experts, which hold all experts' weights in one parameter, as quire's, which have each their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.errors import UnsupportedModelError
from quire.kernels.experts import Routing
from quire.layers import Experts
from quire.layers.activation import gated_activation
from quire.models.fallback.choices import activation_kind

# Never used: transformers' router has chosen when quire's experts are called.
_CHOSEN = Routing("softmax_of_chosen")


class RoutedExperts(Experts):
    """Experts whose tokens' choice and shares are given."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: [T, hidden]; chosen: [T, k] experts' numbers; weights: [T, k] -> [T, hidden]."""
        (tokens, many), device = chosen.shape, x.device
        experts = chosen.to(torch.int32).contiguous()
        starts = torch.empty((len(self) + 1,), dtype=torch.int32, device=device)
        rows = torch.empty((tokens * many,), dtype=torch.int64, device=device)
        places = torch.empty((tokens, many), dtype=torch.int32, device=device)
        kernels.sort_by_expert(experts, starts, rows, places)
        inner = self.activate(self.gate_up(kernels.embedding(rows, x.contiguous()), starts, rows, tokens))
        return kernels.combine(self.down(inner, starts, rows, tokens), places, weights.float().contiguous())


def is_experts(module: nn.Module) -> bool:
    """Whether it is of a class that transformers' experts interface knows."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))


def fused_names(module: Any) -> tuple[str, ...]:
    """The parameters that hold all experts' weights."""
    names = ("gate_up_proj", "down_proj")
    return names if not module.has_bias else (*names, *(f"{name}_bias" for name in names))


def shape_of(module: Any) -> tuple[int, int, int]:
    """(experts, hidden size, inner size). Raises UnsupportedModelError for experts of another build."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{type(module).__name__}: experts without a gate, or with norms, are not served.")
    others = {name for name, _ in module.named_parameters(recurse=False)} - set(fused_names(module))
    if others or module.gate_up_proj.dim() != 3:
        raise UnsupportedModelError(f"{type(module).__name__}: its experts have {sorted(others)} of their own.")
    count, rows, columns = module.gate_up_proj.shape
    hidden, inner = (rows, columns // 2) if module.is_transposed else (columns, rows // 2)
    return count, hidden, inner


def routed(module: Any) -> RoutedExperts:
    """quire's experts for transformers'."""
    from transformers.integrations.moe import _default_apply_gate

    count, hidden, inner = shape_of(module)
    gate = type(module)._apply_gate
    kind = activation_kind(getattr(module, "act_fn", None))
    if gate is _default_apply_gate and kind is not None and module.is_concatenated:
        activate: Callable[[torch.Tensor], torch.Tensor] = gated_activation(kind)
    else:
        activate = _own_gate(module)
    with torch.device("meta"):
        return RoutedExperts(
            count, 1, hidden, inner, _CHOSEN, activate, bias=module.has_bias, interleaved=not module.is_concatenated
        )


def _own_gate(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module's own function of gates and ups, which are put in the order in which it has them."""
    order = module.is_concatenated

    def activate(x: torch.Tensor) -> torch.Tensor:
        given = x if order else x.view(len(x), 2, -1).transpose(1, 2).reshape(x.shape)
        made: torch.Tensor = module._apply_gate(given)
        return made.contiguous()

    return activate


def slices(module: Any, path: str) -> Iterator[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], int, int, bool]]:
    """(a layer's parameter, the name of that of all experts, what takes the one from the other, the expert, which of
    the layers that share the parameter, whether the layers lie there one behind the other as they are)"""
    count, _, inner = shape_of(module)

    def taken(expert: int, first: int, many: int, bias: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(stacked: torch.Tensor) -> torch.Tensor:
            own = stacked[expert]
            own = own.t() if module.is_transposed and not bias else own
            if many == 1:
                return own
            return own[first * inner : (first + 1) * inner] if module.is_concatenated else own[first::many]

        return take

    for fused in fused_names(module):
        bias, stem = fused.endswith("_bias"), fused.removesuffix("_bias")
        layers = ("gate_proj", "up_proj") if stem == "gate_up_proj" else ("down_proj",)
        for expert in range(count):
            for first, layer in enumerate(layers):
                name = f"{path}.{expert}.{layer}.{'bias' if bias else 'weight'}"
                plain = not module.is_transposed and module.is_concatenated
                yield name, f"{path}.{fused}", taken(expert, first, len(layers), bias), expert, first, plain
