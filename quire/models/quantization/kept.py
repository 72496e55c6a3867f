"""Folders that `quire quantize` has written: rows of bytes, and all else as it stood, by the model's own names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from quire.checkpoint.weights import StoredPart
from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.quantized import RowLayout
from quire.models.conformity import filled_by_files
from quire.models.quantization.of_floats import GROUP, KINDS, columns_of
from quire.models.quantization.plan import QuantizationPlan, QuantizedLayer

if TYPE_CHECKING:
    from quire.checkpoint.files import Checkpoint
    from quire.models.base import CausalLM

METHOD = "quire"
_FORM = 1  # of what is written


def settings_of(name: str) -> dict[str, Any]:
    """config.json's quantization_config for `quantization=name`."""
    return {"quant_method": METHOD, "form": _FORM, "quantization": name, "bits": int(name[3:]), "group_size": GROUP}


def plan_of_kept(model: CausalLM, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> QuantizationPlan:
    """Which layers have rows in the files, and of which kind: their length says it. Raises UnsupportedModelError."""
    name = settings.get("quantization")
    if not isinstance(name, str) or name not in KINDS or dict(settings) != settings_of(name):
        raise UnsupportedModelError(
            f"config.json: quantization_config={dict(settings)!r:.200} is none that `quire quantize` of this version "
            "writes: make the folder anew."
        )
    model.see_files(checkpoint)  # of which its parts follow
    parts, shapes = model.checkpoint_parts(), checkpoint.shapes()
    tied = {**model.tied_weights, **{of: weight for weight, of in model.tied_weights.items()}} if model.is_tied else {}
    layers: dict[str, QuantizedLayer] = {}
    for path, module in model.named_modules():
        features, weight = columns_of(model, path, module), f"{path}.weight"
        stored = weight if weight in shapes else tied.get(weight, "")
        if features is None or stored not in shapes or checkpoint.tensor(stored).dtype is not torch.uint8:
            continue
        layout = _layout(stored, features, shapes[stored])
        own = StoredPart({weight: torch.Size(shapes[stored])}, _itself, {weight: (torch.uint8,)})
        layers[path] = QuantizedLayer(layout, own if stored == weight else None)
    others: dict[str, StoredPart] = {}
    for place, tensor in filled_by_files(model).items():
        turned = tensor.ndim == 2 and any(re.fullmatch(one, place) for one in model.checkpoint_transposed)
        if place in shapes and place.removesuffix(".weight") not in layers and (place in parts or turned):
            others[place] = StoredPart({place: tensor.shape}, _itself)
    names = {stored: stored for stored in shapes}
    return QuantizationPlan(layers, others, names, widens_experts=True)


def _itself(stored: torch.Tensor) -> torch.Tensor:
    return stored


def _layout(name: str, features: int, shape: tuple[int, ...]) -> RowLayout:
    """Of rows of so many bytes. Raises CheckpointError."""
    for kind in sorted({kind for kinds in KINDS.values() for kind in kinds}):
        if features % GROUP == 0 and len(shape) == 2 and RowLayout(kind, features).row_bytes == shape[1]:
            return RowLayout(kind, features)
    raise CheckpointError(f"{name}: its shape {tuple(shape)} is that of no rows of {features} columns.")
