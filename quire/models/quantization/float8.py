"""Weights of 8-bit floats (e4m3): DeepSeek's blocks, as transformers' FineGrainedFP8 has them, and one scale for all.

weight [N, K] float8_e4m3fn; weight_scale_inv [N / rows, K / columns], by which a block is multiplied. Inputs that the
settings call "dynamic" are multiplied as they are: rounding each to eight bits first is what lets a GPU's units of
eight bits be used, and costs accuracy. So does transformers wherever there is no such GPU.
"""

from __future__ import annotations

from functools import partial

import torch

from quire.kernels.quantized import RowKind, RowLayout
from quire.models.quantization.codes import rows
from quire.models.quantization.settings import Settings
from quire.models.quantization.stored import FLOATS, PackedWeight, StoredLayer

# What each of the 256 codes stands for.
TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class Float8:
    """Raises UnsupportedModelError for settings that are not served."""

    leaves = frozenset({"weight_scale_inv", "weight_scale", "weight"})
    as_linear = True

    def __init__(self, settings: Settings) -> None:
        reason = "served is 'dynamic' alone: scales that were measured beforehand change what is computed"
        scheme = settings.take("activation_scheme", "dynamic")
        if scheme != "dynamic":
            settings.refuse("activation_scheme", scheme, reason)
        settings.one_of("fmt", ("e4m3",), "e4m3")
        settings.one_of("scale_fmt", ("float",), "float")
        settings.one_of("expert_dtype", ("fp8",), "fp8")
        settings.one_of("kv_cache_scheme", (False,), False)
        self.block = settings.take("weight_block_size")
        block = self.block
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
        ):
            settings.refuse("weight_block_size", block, "it must be numbers of rows and of columns")
        # Which layers are left as they are shows in the files.
        settings.drop(("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"))
        settings.finish()

    def is_quantized(self, leaves: frozenset[str]) -> bool:
        return "weight_scale_inv" in leaves or "weight_scale" in leaves

    def weight(self, layer: StoredLayer) -> PackedWeight:
        n, k = layer.rows, layer.columns
        height, width = (min(one, size) for one, size in zip(self.block or (n, k), (n, k), strict=True))
        scale = "weight_scale_inv" if "weight_scale_inv" in layer else "weight_scale"
        layer.expect("weight", [(n, k)], (torch.float8_e4m3fn,))
        one = [] if self.block else [(), (1,)]
        layer.expect(scale, [*one, (-(-n // height), -(-k // width))], FLOATS)
        layout = RowLayout(RowKind.TABLE8, k, width, zeros=False)
        return PackedWeight(layout, ("weight", scale), partial(block_rows, n, height), TABLE)


def block_rows(n: int, height: int, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows with a table; height: rows that have a scale in common."""
    scale = scale if scale.dim() == 2 else scale.reshape(-1, 1)
    if len(scale) != n:
        scale = scale.repeat_interleave(height, 0)[:n]
    return rows(weight.view(torch.uint8), scale)
