"""bitsandbytes' checkpoints: 8 bits (LLM.int8(), arXiv:2208.07339), and 4 bits, NF4 or FP4 (QLoRA, arXiv:2305.14314).

8 bits: weight [N, K] int8; SCB [N] float32, each row's largest number, which 127 stands for. Inputs are multiplied as
they are: bitsandbytes rounds them to 8 bits but for columns with outliers, which the others of a batch decide on.

4 bits: weight [N K / 2, 1] bytes, the first of two codes in the upper four bits; weight.absmax, a scale for each
`blocksize` codes, rows' ends or not; weight.quant_map [16], what codes stand for; and what remains as JSON in
weight.quant_state.bitsandbytes__nf4 (or __fp4). With double quantization, scales are codes of 8 bits themselves:
nested_quant_map[absmax] * nested_absmax + nested_offset, nested_absmax one for each `nested_blocksize`.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import torch

from quire.kernels.quantized import RowKind, RowLayout
from quire.models.quantization.codes import rows
from quire.models.quantization.settings import Settings
from quire.models.quantization.stored import PackedWeight, StoredLayer

_STATE = "weight.quant_state.bitsandbytes__"
_NOTES = frozenset({
    "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold",
})  # fmt: skip
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
_STATE_FIELDS = frozenset({
    "quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset",
})  # fmt: skip
_LEAST_GROUP = 8
_MOST_STATE = 4096  # bytes


class BitsAndBytes:
    """Raises UnsupportedModelError for settings that are not served."""

    leaves = frozenset({
        "weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
        "weight.nested_quant_map", f"{_STATE}nf4", f"{_STATE}fp4",
    })  # fmt: skip
    as_linear = True

    def __init__(self, settings: Settings) -> None:
        settings.one_of("llm_int8_has_fp16_weight", (False,), False)
        eight = settings.flag("load_in_8bit", False)
        four = settings.flag("load_in_4bit", False)
        if eight == four:
            settings.refuse("load_in_4bit", four, f"one of it and load_in_8bit ({eight}) must be set")
        kind = settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self.kind = None if eight else kind
        settings.drop(_NOTES)
        settings.finish()

    def is_quantized(self, leaves: frozenset[str]) -> bool:
        return "SCB" in leaves or "weight.absmax" in leaves or any(leaf.startswith(_STATE) for leaf in leaves)

    def weight(self, layer: StoredLayer) -> PackedWeight:
        return self._eight(layer) if self.kind is None else self._four(layer, self.kind)

    def _eight(self, layer: StoredLayer) -> PackedWeight:
        n, k = layer.rows, layer.columns
        layer.expect("weight", [(n, k)], (torch.int8,))
        layer.expect("SCB", [(n,)], (torch.float32,))
        unread: tuple[str, ...] = ()
        if "weight_format" in layer:
            unread = ("weight_format",)
            if int(layer.expect("weight_format", [(), (1,)], (torch.uint8,)).item()):
                layer.refuse("weight_format", "is not 0: rows that are turned for a GPU's units")
        layout = RowLayout(RowKind.AFFINE8, k, 0, zeros=False)
        return PackedWeight(layout, ("weight", "SCB"), _eight_rows, None, unread)

    def _four(self, layer: StoredLayer, kind: str) -> PackedWeight:
        n, k = layer.rows, layer.columns
        state_leaf = _STATE + kind
        state = _state(layer, state_leaf)
        size = state.get("blocksize")
        if type(size) is not int or size < 1 or state.get("quant_type") != kind or state.get("shape") != [n, k]:
            layer.refuse(state_leaf, f"says {state}, and its weight is {kind}, [{n}, {k}]")
        size = min(size, n * k)
        # Blocks go on over rows' ends: columns that always have a scale in common are so many.
        group = math.gcd(k, size)
        if group < _LEAST_GROUP and group != k:
            layer.refuse(state_leaf, f"has blocks of {size} over rows of {k}: pieces of {group}, below {_LEAST_GROUP}")
        blocks = -(-n * k // size)
        weight = layer.tensor("weight")
        stored = -(-n * k // 2)
        sizes = [(stored // weight.element_size(), 1), (1, stored // weight.element_size())]
        layer.expect("weight", sizes, _STORAGE)
        table = layer.expect("weight.quant_map", [(16,)], (torch.float32,)).clone()
        leaves = ["weight", "weight.absmax"]
        nested: tuple[int, float] | None = None
        if "weight.nested_absmax" in layer:
            nested = _nested(layer, state, state_leaf, blocks)
            layer.expect("weight.absmax", [(blocks,)], (torch.uint8,))
            leaves += ["weight.nested_absmax", "weight.nested_quant_map"]
        else:
            layer.expect("weight.absmax", [(blocks,)], (torch.float32,))
        make = partial(_four_rows, n, k, size, group, nested)
        layout = RowLayout(RowKind.TABLE4, k, group, zeros=False)
        return PackedWeight(layout, leaves, make, table, ("weight.quant_map", state_leaf))


def _state(layer: StoredLayer, leaf: str) -> dict[str, Any]:
    stored = layer.tensor(leaf)
    if stored.dtype is not torch.uint8 or stored.numel() > _MOST_STATE:
        layer.refuse(leaf, "is no JSON of a few bytes")
    try:
        state = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError):
        layer.refuse(leaf, "is no JSON")
    if not isinstance(state, dict) or not state.keys() <= _STATE_FIELDS:
        layer.refuse(leaf, f"says {state}: fields that quire does not know")
    return state


def _nested(layer: StoredLayer, state: dict[str, Any], leaf: str, blocks: int) -> tuple[int, float]:
    size: Any = state.get("nested_blocksize")
    offset: Any = state.get("nested_offset")
    if type(size) is not int or size < 1 or type(offset) not in (int, float) or not math.isfinite(offset):
        layer.refuse(leaf, f"says {state}, without a nested_blocksize and a nested_offset")
    size = min(size, blocks)
    layer.expect("weight.nested_absmax", [(-(-blocks // size),)], (torch.float32,))
    layer.expect("weight.nested_quant_map", [(256,)], (torch.float32,))
    return size, float(offset)


def _eight_rows(weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return rows(weight.view(torch.uint8) ^ 128, largest.unsqueeze(1) / 127)


def _four_rows(
    n: int, k: int, size: int, group: int, nested: tuple[int, float] | None, weight: torch.Tensor,
    absmax: torch.Tensor, nested_absmax: torch.Tensor | None = None, nested_map: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if nested is not None and nested_absmax is not None and nested_map is not None:
        outer = nested_absmax.repeat_interleave(nested[0])[: len(absmax)]
        absmax = nested_map[absmax.int()] * outer + torch.tensor(nested[1])
    scales = absmax.repeat_interleave(size // group)[: n * k // group].view(n, k // group)
    codes = weight.reshape(-1).view(torch.uint8)
    swapped = codes >> 4 | codes << 4
    return rows(swapped.view(n, k // 2), scales)
