"""A plan: formats of a model's layers, and the stored tensors that their rows are made of.

Plain data, made of a model on the meta device by whatever reads a kind of quantized weights; `apply` gives the layers
their formats before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.kernels.quantized import QuantizedWeight, RowLayout
from quire.layers import Embedding, ExpertLinear, LatentProjection, Linear
from quire.layers.quantization import QuantizedRows

_CPU = torch.device("cpu")


class Model(Protocol):
    """What a plan asks of a model: see `CausalLM`."""

    def keeps_floats(self, name: str) -> bool: ...

    def get_submodule(self, target: str) -> nn.Module: ...


@dataclass(frozen=True)
class QuantizedLayer:
    """One Linear or Embedding, by its path in the model.

    layout: of its rows. rows: what makes them, uint8 [out_features, row_bytes], of stored tensors, by their names in
    the files; None: no tensor does, and it shares those of the layer that it is tied to. aux: what rows share
    (`QuantizedRows.aux`): a tensor with numbers, or what makes it of stored tensors; aux_shape, aux_dtype: the
    latter's.
    """

    layout: RowLayout
    rows: StoredPart | None
    aux: torch.Tensor | StoredPart | None = None
    aux_shape: tuple[int, ...] = ()
    aux_dtype: torch.dtype = torch.int32


@dataclass(frozen=True)
class QuantizationPlan:
    """layers: by path. parts: what else is made of stored tensors, by place: a norm that files have otherwise, say.

    names: a parameter's name for each of the files' names that is another. ignored: the files' names that hold nothing
    to load. Names of tensors that parts are made of need not be in either. widens_experts: on a GPU, which has no
    kernels for their rows, experts become floats. no_adapters: why adapters of the published model would not do here
    what they do there; "": they would.
    """

    layers: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()
    widens_experts: bool = False
    no_adapters: str = ""

    def for_model(self, model: Model, device: torch.device = _CPU) -> QuantizationPlan:
        """The same, with floats for the layers of which the model, or the device that it is for, takes nothing else:
        `CausalLM.keeps_floats`, what latent attention absorbs, and experts as `widens_experts` says.

        Raises UnsupportedModelError for such a one that shares another's rows.
        """
        kinds = (LatentProjection, *((ExpertLinear,) if self.widens_experts and device.type == "cuda" else ()))
        floats = {
            path: own
            for path, own in self.layers.items()
            if isinstance(model.get_submodule(path), kinds) or model.keeps_floats(path)
        }
        parts = {}
        for path, own in floats.items():
            if own.rows is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {path} shares quantized rows, and the model needs floats there: take "
                    "weights of 16 bits."
                )
            parts[f"{path}.weight"] = dequantized_part(own)
        layers = {path: own for path, own in self.layers.items() if path not in floats}
        return replace(self, layers=layers, parts={**self.parts, **parts}) if floats else self

    def apply(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Give the layers their formats. dtype: the model's. Raises UnsupportedModelError for a path that has none."""
        for path, own in self.layers.items():
            module = model.get_submodule(path)
            if isinstance(module, Linear):
                aux = own.aux
                if isinstance(aux, StoredPart):
                    aux = torch.empty(own.aux_shape, dtype=own.aux_dtype, device="meta")
                module.set_format(QuantizedRows(own.layout, aux), module._parameters["bias"] is not None)
            elif isinstance(module, Embedding) and own.aux is None:
                module.set_layout(own.layout, dtype)
            else:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: {path} is no layer whose weights may be quantized."
                )

    def all_parts(self) -> dict[str, StoredPart]:
        """By the place that each fills."""
        made = dict(self.parts)
        for path, own in self.layers.items():
            if own.rows is not None:
                made[f"{path}.weight"] = own.rows
            if isinstance(own.aux, StoredPart):
                made[f"{path}.aux"] = own.aux
        return made

    def all_names(self) -> dict[str, str]:
        """The files' names -> those by which they are matched; what parts are made of keeps its own."""
        own = {name: name for part in self.all_parts().values() for name in part.shapes}
        return {**own, **self.names}


def dequantized_part(layer: QuantizedLayer) -> StoredPart:
    """What makes a layer's weight of floats, [out_features, in_features], of the tensors of which its rows are made."""
    rows, aux = layer.rows, layer.aux
    assert rows is not None
    names = list(rows.shapes)
    if not isinstance(aux, StoredPart):
        return StoredPart(
            rows.shapes,
            lambda *stored: QuantizedWeight(rows.make(*stored), layer.layout, aux).dequantize(),
            rows.dtypes,
            rows.either_way,
        )
    shapes = {**rows.shapes, **aux.shapes}  # a tensor may be in both

    def make(*stored: torch.Tensor) -> torch.Tensor:
        by_name = dict(zip(shapes, stored, strict=True))
        own = aux.make(*(by_name[name] for name in aux.shapes))
        return QuantizedWeight(rows.make(*(by_name[name] for name in names)), layer.layout, own).dequantize()

    return StoredPart(shapes, make, {**rows.dtypes, **aux.dtypes}, rows.either_way)
