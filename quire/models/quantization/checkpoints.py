"""A checkpoint whose `quantization_config` names a method: which of a model's layers it has quantized, and of what.

The files decide: a layer is quantized if they have the method's tensors for it, and its settings say what these mean.
So lists of layers that are left as they are need not be understood in every spelling that there is of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from quire.checkpoint.matching import NameRules, Place
from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.layers import Linear
from quire.models.quantization.plan import QuantizationPlan, QuantizedLayer
from quire.models.quantization.settings import Settings
from quire.models.quantization.stored import Method, PackedWeight, StoredLayer

if TYPE_CHECKING:
    from quire.checkpoint.files import Checkpoint
    from quire.models.base import CausalLM


def quantizer_of(
    method: Callable[[Settings], Method],
) -> Callable[[CausalLM, Checkpoint, Mapping[str, Any]], QuantizationPlan]:
    """A `Quantizer` of a method's settings."""

    def plan(model: CausalLM, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> QuantizationPlan:
        fields = Settings(settings, "quantization_config")
        fields.drop(("quant_method",))
        return _plan(model, checkpoint, method(fields))

    return plan


def _plan(model: CausalLM, checkpoint: Checkpoint, method: Method) -> QuantizationPlan:
    """Raises CheckpointError for tensors that do not fit, UnsupportedModelError for layers that are not served."""
    rules = NameRules(
        type(model).__name__,
        model.checkpoint_renames,
        model.checkpoint_ignored,
        model.checkpoint_transposed,
        exact=model.see_files(checkpoint),
    )
    parts, modules = model.checkpoint_parts(), dict(model.named_modules())
    made: dict[str, QuantizedLayer] = {}
    ignored: set[str] = set()
    for stem, names in _quantized(checkpoint, method):
        place = rules.renamed(f"{stem}.weight")
        if rules.is_ignored(place):
            ignored |= set(names.values())
            continue
        linears = _linears(place, parts, modules)
        if linears is None:
            raise UnsupportedModelError(
                f"{checkpoint.directory}: {stem} is quantized, and is no layer of {rules.owner} whose weights may be."
            )
        first = next(iter(linears.values()))[0]
        rows = first.out_features if len(linears) == 1 and place not in _stacked(parts) else parts_rows(place, parts)
        if method.as_linear and rules.is_transposed(place, Place(torch.Size((rows, first.in_features)))):
            raise UnsupportedModelError(
                f"{checkpoint.directory}: {stem} is quantized, and {rules.owner}'s files have it transposed."
            )
        weight = _weight(checkpoint, method, stem, names, rows, first.in_features)
        ignored |= {names[leaf] for leaf in weight.unread}
        for path, (linear, part) in linears.items():
            made[path] = _layer(checkpoint, rules.owner, stem, names, weight, rows, linear, part)
    return QuantizationPlan(made, ignored=ignored)


def _quantized(checkpoint: Checkpoint, method: Method) -> Iterator[tuple[str, dict[str, str]]]:
    """(a quantized layer's name in the files, the files' name for each of its leaves)"""
    longest_first = sorted(method.leaves, key=len, reverse=True)
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.names():
        leaf = next((one for one in longest_first if name.endswith(f".{one}")), None)
        if leaf is not None:
            found.setdefault(name[: -len(leaf) - 1], {})[leaf] = name
    return ((stem, names) for stem, names in found.items() if method.is_quantized(frozenset(names)))


def _stacked(parts: Mapping[str, StoredPart]) -> set[str]:
    return {stored for part in parts.values() for stored in part.shapes}


def parts_rows(place: str, parts: Mapping[str, StoredPart]) -> int:
    """Rows of the stored weight that several layers are parts of."""
    return next(part.shapes[place][0] for part in parts.values() if place in part.shapes)


def _linears(
    place: str, parts: Mapping[str, StoredPart], modules: Mapping[str, Any]
) -> dict[str, tuple[Linear, StoredPart | None]] | None:
    """The layers, by path, that a stored weight fills, and how, if they are parts of it; None: there are none."""
    path = place.removesuffix(".weight")
    module = modules.get(path)
    if isinstance(module, Linear) and place not in parts:
        return {path: (module, None)}
    found: dict[str, tuple[Linear, StoredPart | None]] = {}
    for own, part in parts.items():
        if place in part.shapes:
            linear = modules.get(own.removesuffix(".weight"))
            if not isinstance(linear, Linear) or len(part.shapes) != 1:
                return None
            found[own.removesuffix(".weight")] = linear, part
    return found or None


def _weight(
    checkpoint: Checkpoint, method: Method, stem: str, names: Mapping[str, str], rows: int, columns: int
) -> PackedWeight:
    try:
        return method.weight(StoredLayer(checkpoint, names, stem, rows, columns))
    except UnsupportedModelError:
        raise
    except ValueError as error:  # a layout that there is not
        if type(error) is not ValueError:
            raise
        raise UnsupportedModelError(f"{checkpoint.directory}: {stem}: {error}.") from error


def _layer(
    checkpoint: Checkpoint,
    owner: str,
    stem: str,
    names: Mapping[str, str],
    weight: PackedWeight,
    rows: int,
    linear: Linear,
    part: StoredPart | None,
) -> QuantizedLayer:
    stored = {names[leaf]: checkpoint.tensor(names[leaf]) for leaf in weight.leaves}
    make = weight.make
    if part is not None:
        make = _some_rows(make, _rows_of_part(checkpoint, owner, stem, rows, linear, part))
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    dtypes = {name: (tensor.dtype,) for name, tensor in stored.items()}
    return QuantizedLayer(weight.layout, StoredPart(shapes, make, dtypes), weight.aux)


def _rows_of_part(
    checkpoint: Checkpoint, owner: str, stem: str, rows: int, linear: Linear, part: StoredPart
) -> torch.Tensor:
    """Which rows of the stored weight are a layer's: found by having them made of rows of their own numbers."""
    numbers = torch.arange(rows).unsqueeze(1).expand(rows, linear.in_features)
    own = part.make(numbers)
    if own.shape != (linear.out_features, linear.in_features) or not torch.equal(own, own[:, :1].expand_as(own)):
        raise UnsupportedModelError(
            f"{checkpoint.directory}: {stem} is quantized, and {owner}'s layers are no rows of it."
        )
    return own[:, 0].clone()


def _some_rows(make: Callable[..., torch.Tensor], own: torch.Tensor) -> Callable[..., torch.Tensor]:
    def rows(*stored: torch.Tensor) -> torch.Tensor:
        return make(*stored)[own]

    return rows


__all__ = ["quantizer_of"]
