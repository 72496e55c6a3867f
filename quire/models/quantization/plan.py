"""A plan: formats of a model's layers, and the stored tensors that their rows are made of.

Plain data, made of a model on the meta device by whatever reads a kind of quantized weights; `apply` gives the layers
their formats before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.kernels.quantized import RowLayout
from quire.layers import Embedding, Linear
from quire.layers.quantization import QuantizedRows


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
    to load. Names of tensors that parts are made of need not be in either.
    """

    layers: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()

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
