"""`quantization="int8"` and `"int4"`: rows of 8 or 4 bits, made of any checkpoint's floats while they are loaded.

Groups of 32 columns have a scale in float16: GGML's Q8_0, with codes around 0, or Q4_1, which has a least number too. A
tensor is made in pieces, of what the files map, so that no float model ever stands beside the quantized one. What a row
becomes depends on its numbers alone: every load gives the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from quire.checkpoint.files import Checkpoint, listed
from quire.checkpoint.matching import Matches
from quire.checkpoint.weights import StoredPart, StoredWeight
from quire.errors import CheckpointError
from quire.kernels.quantized import RowKind, RowLayout, quantize_rows
from quire.layers import Embedding, LatentProjection, Linear, Router
from quire.models.base import CausalLM
from quire.models.quantization.plan import QuantizationPlan, QuantizedLayer

GROUP = 32  # columns of one scale
# Of the layers, and of embeddings and the projection to the vocabulary: with 4 bits there, four times the quality would
# be lost that all other layers together lose.
KINDS: Mapping[str, tuple[RowKind, RowKind]] = MappingProxyType(
    {"int8": (RowKind.Q8_0, RowKind.Q8_0), "int4": (RowKind.Q4_1, RowKind.Q8_0)}
)
_PIECE = 1 << 17  # numbers that are quantized at a time: few enough to stay in a cache of the processor

logger = logging.getLogger("quire")


def plan_of_floats(model: CausalLM, checkpoint: Checkpoint, matches: Matches, name: str) -> QuantizationPlan:
    """What `quantization=name`, one of KINDS, does to a model on the meta device.

    matches: of its places, before any is quantized. Routers, towers, latent attention's absorbed
    weights, and layers whose inputs are no multiple of 32 stay floats.
    """
    kinds, odd = _kinds(model, name)
    layers: dict[str, QuantizedLayer] = {}
    shared = {weight: of for weight, of in matches.shares.items() if weight.endswith(".weight")}
    for weight, of in shared.items():  # of a pair, both or none
        pair = weight.removesuffix(".weight"), of.removesuffix(".weight")
        if not all(path in kinds for path in pair):
            for path in pair:
                kinds.pop(path, None)
    for one in matches.wanted:
        path = one.name.removesuffix(".weight")
        if path in kinds and one.name != path:
            kind, features = kinds[path]
            layers[path] = QuantizedLayer(RowLayout(kind, features), _part(checkpoint, one, kind))
    for weight in shared:
        path = weight.removesuffix(".weight")
        if path in kinds:
            layers[path] = QuantizedLayer(RowLayout(*kinds[path]), None)
    if odd:
        logger.warning(
            "quantization=%s: %s stay floats: groups of %d columns do not go into theirs", name, listed(odd, 4), GROUP
        )
    used = {stored for one in matches.wanted for stored in one.tensors}
    # What files have besides, a tied tensor's second copy among it, fills no place.
    unused = {stored: f"{stored} (unused)" for stored in checkpoint.names() if stored not in used}
    return QuantizationPlan(layers, names=unused, ignored=tuple(unused.values()), widens_experts=True)


def _kinds(model: CausalLM, name: str) -> tuple[dict[str, tuple[RowKind, int]], list[str]]:
    """(layer -> what its rows become, and its columns; layers that have no whole groups)"""
    found: dict[str, tuple[RowKind, int]] = {}
    odd = []
    output = getattr(model, "language_model", model).output_projection
    for path, module in model.named_modules():
        features = columns_of(model, path, module)
        if features is None:
            continue
        if features % GROUP:
            odd.append(path)
            continue
        found[path] = KINDS[name][isinstance(module, Embedding) or module is output], features
    return found, odd


def columns_of(model: CausalLM, path: str, module: torch.nn.Module) -> int | None:
    """The columns of a layer that may be quantized; None: no such layer."""
    if model.is_visual(path) or model.keeps_float32(f"{path}.weight") or model.keeps_floats(path):
        return None
    if isinstance(module, Embedding):
        return module.size
    if not isinstance(module, Linear) or isinstance(module, (LatentProjection, Router)):
        return None
    return module.in_features if module.out_features > 1 else None  # a gate, which says how much of something counts


def _part(checkpoint: Checkpoint, one: StoredWeight, kind: RowKind) -> StoredPart:
    """What makes the rows of what would have made the floats."""
    label = f"{checkpoint.directory}: {one.name}"
    if one.part is not None:
        return replace(one.part, make=partial(_rows, label, kind, one.part.make))
    shape = torch.Size(reversed(one.shape)) if one.transposed else one.shape
    make = torch.t if one.transposed else _itself
    return StoredPart({one.stored: shape}, partial(_rows, label, kind, make))


def _itself(stored: torch.Tensor) -> torch.Tensor:
    return stored


def _rows(label: str, kind: RowKind, make: Callable[..., torch.Tensor], *stored: torch.Tensor) -> torch.Tensor:
    floats = make(*stored)
    layout = RowLayout(kind, floats.shape[1])
    rows = torch.empty((len(floats), layout.row_bytes), dtype=torch.uint8)
    step = max(1, _PIECE // max(1, layout.features))
    for first in range(0, len(floats), step):
        piece = quantize_rows(floats[first : first + step], kind)
        numbers = 4 if kind is RowKind.Q4_1 else 2  # bytes: a scale, and a least number
        scales = piece.view(-1, layout.row_bytes * GROUP // layout.features)[:, :numbers]
        scales = scales.contiguous().view(torch.float16)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"{label} has numbers that are not finite, or too large for a scale in float16.")
        rows[first : first + step] = piece
    return rows
