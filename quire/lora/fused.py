"""Adapters of experts whose weights transformers' newer versions hold in one parameter: PEFT's `target_parameters`.

PEFT keeps the shares of all experts of a parameter [E, N, K] in one pair: A [E r, K], one expert's rows after the
other's, and B [N, r E], in whose columns an expert's stand E apart. They are taken apart into what adapters of the
single layers have. Of two parameters of a module, one is called after the module's `base_layer`: the shapes tell which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import AdapterError
from quire.layers import Experts
from quire.lora.files import Parts
from quire.models.base import CausalLM

_WRAPPED = ".base_layer"
_KINDS = {"lora_A.weight", "lora_B.weight"}


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """layers: of an expert, in the order of their rows in the parameter."""

    experts: Experts
    layers: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of one expert's."""
        linears = [getattr(self.experts[0], layer) for layer in self.layers]
        return linears[0].in_features, sum(linear.out_features for linear in linears)

    def split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of one expert's, by layer."""
        if self.experts.interleaved:
            return [rows[place :: len(self.layers)] for place in range(len(self.layers))]
        return torch.split(rows, [getattr(self.experts[0], layer).out_features for layer in self.layers])

    def names(self, path: str) -> list[str]:
        """The layers of all experts; path: what the module of the experts is called."""
        return [f"{path}.{number}.{layer}" for number in range(len(self.experts)) for layer in self.layers]


def fused_parameters(model: CausalLM) -> dict[str, dict[str, FusedParameter]]:
    """The model's own name of each module of experts -> its parameters in transformers' newer versions, by name."""
    return {
        name: {
            "gate_up_proj": FusedParameter(module, ("gate_proj", "up_proj")),
            "down_proj": FusedParameter(module, ("down_proj",)),
        }
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    }


def split_parts(
    parts: Mapping[str, Parts], fused: Mapping[str, Mapping[str, FusedParameter]], where: str
) -> dict[str, Parts]:
    """LoRA tensors by module, those of fused parameters taken apart. fused: by the name of the module in the file.

    Raises AdapterError for shapes that are no parameter's.
    """
    if not fused:
        return dict(parts)
    found: dict[str, Parts] = {}
    for name, kinds in parts.items():
        path = name
        while path.endswith(_WRAPPED):
            path = path.removesuffix(_WRAPPED)
        if path not in fused or set(kinds) != _KINDS:
            found[name] = kinds
            continue
        own = _split(kinds, fused[path], path, where)
        if not own.keys().isdisjoint(found):
            raise AdapterError(f"{where}: {path} has the shares of one parameter twice.")
        found.update(own)
    return found


def _split(kinds: Parts, parameters: Mapping[str, FusedParameter], path: str, where: str) -> dict[str, Parts]:
    a, b = kinds["lora_A.weight"], kinds["lora_B.weight"]
    for parameter in parameters.values():
        count, (features, columns) = len(parameter.experts), parameter.shape
        rank, rest = divmod(a.shape[0], count)
        if a.shape[1:] == (features,) and b.shape == (columns, a.shape[0]) and rank and not rest:
            a, b = a.view(count, rank, features), b.view(columns, rank, count)
            return {
                f"{path}.{e}.{layer}": {"lora_A.weight": a[e], "lora_B.weight": part}
                for e in range(count)
                for layer, part in zip(parameter.layers, parameter.split(b[:, :, e]), strict=True)
            }
    shapes = " or ".join(
        f"[r * {len(one.experts)}, {one.shape[0]}] and [{one.shape[1]}, r * {len(one.experts)}] for {name}"
        for name, one in parameters.items()
    )
    raise AdapterError(
        f"{where}: {path} has lora_A of shape {list(a.shape)} and lora_B of shape {list(b.shape)}, and the model asks "
        f"for {shapes}: it was trained on another base model."
    )
