"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss's files have it: of all experts of a layer in one tensor.

X_blocks [E, N, K / 32, 16] bytes of two four-bit floats each, the first in the lower four bits; X_scales
[E, N, K / 32], powers of two above -127. X is gate_up_proj, of a gate's row and then an up's, or down_proj. The bytes
stay as they are, and rows have their powers as float32: inputs are multiplied by the very numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.kernels.quantized import RowKind, RowLayout
from quire.layers import Experts
from quire.models.quantization.codes import rows
from quire.models.quantization.plan import QuantizationPlan, QuantizedLayer
from quire.models.quantization.settings import Settings

if TYPE_CHECKING:
    from quire.checkpoint.files import Checkpoint
    from quire.models.base import CausalLM

_SHARED = 32  # numbers that have one power of two
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_TABLE = torch.tensor([*_SIZES, *(-size for size in _SIZES)])


def mxfp4(model: CausalLM, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> QuantizationPlan:
    """A `Quantizer`: the experts' weights, but where the files have them as floats. Raises UnsupportedModelError."""
    fields = Settings(settings, "quantization_config")
    # Which layers are left as they are shows in the files.
    fields.drop(("quant_method", "modules_to_not_convert", "dequantize"))
    fields.finish()
    names, layers = set(checkpoint.names()), {}
    for path, module in model.named_modules():
        for stored in _LEAVES if isinstance(module, Experts) else ():
            if f"{path}.{stored}" not in names:
                layers.update(_experts(path, stored, module))
    if not layers:
        raise UnsupportedModelError(f"{fields.where}: quant_method='mxfp4': no experts of this model are in blocks.")
    return QuantizationPlan(layers, widens_experts=True)


def _experts(path: str, stored: str, experts: Experts) -> dict[str, QuantizedLayer]:
    leaves = _LEAVES[stored]
    one: Any = experts[0].get_submodule(leaves[0])
    if one.in_features % _SHARED:
        raise UnsupportedModelError(
            f"{path}.{stored}: {_SHARED} numbers of MXFP4 share a power of two, and its rows have {one.in_features}."
        )
    stacked = (len(experts), len(leaves) * one.out_features, one.in_features // _SHARED)
    shapes = {
        f"{path}.{stored}_blocks": torch.Size((*stacked, _SHARED // 2)),
        f"{path}.{stored}_scales": torch.Size(stacked),
    }
    layout = RowLayout(RowKind.TABLE4, one.in_features, _SHARED)
    return {
        f"{path}.{expert}.{leaf}": QuantizedLayer(
            layout,
            StoredPart(shapes, partial(_rows, expert, first, len(leaves)), dict.fromkeys(shapes, (torch.uint8,))),
            _TABLE,
        )
        for expert in range(len(experts))
        for first, leaf in enumerate(leaves)
    }


def _rows(expert: int, first: int, step: int, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Of one expert's layer: each `step`-th row of the stacked ones, from number `first` on."""
    exponents = scales[expert, first::step].int() - 127
    return rows(blocks[expert, first::step].flatten(1), torch.ldexp(torch.ones(exponents.shape), exponents))


__all__ = ["mxfp4"]
