"""compressed-tensors (https://github.com/vllm-project/compressed-tensors), what llm-compressor writes.

"pack-quantized": weight_packed [N, K bits / 32] int32, codes without gaps; weight_zero_point [N bits / 32, G] int32,
packed down a column. "int-quantized", "naive-quantized", "float-quantized": weight [N, K] of int8 or float8_e4m3fn;
weight_zero_point [N, G] int8. weight_scale: one, [N, 1], [N, K / group], or [N / rows, K / columns] of blocks.
weight_g_idx [K] int32: each column's group, if that does not follow from its place. w = (code - zero) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.checkpoint.patterns import Patterns
from quire.errors import UnsupportedModelError
from quire.kernels.quantized import RowKind, RowLayout
from quire.models.quantization import codes
from quire.models.quantization.float8 import TABLE, block_rows
from quire.models.quantization.settings import NEUTRAL, Settings
from quire.models.quantization.stored import FLOATS, PackedWeight, StoredLayer

PACKED = "pack-quantized"
PLAIN = ("int-quantized", "naive-quantized", "float-quantized")
# How the numbers were found.
_NOTES = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
_TOP_NOTES = frozenset({"global_compression_ratio", "quantization_status", "version"})
_INT = (torch.int32,)
# The order in which columns were taken. With `_ELSEWHERE`, groups are not of neighbours, and the files say them.
_ELSEWHERE = ("group", "dynamic")
_ORDERS = (*_ELSEWHERE, "weight", "static", False)


@dataclass(frozen=True)
class Scheme:
    """How the layers of one group are quantized. int8_inputs: what they are given is, too, each token by itself.
    by_activations: groups are of columns that lie apart."""

    where: str
    format: str
    targets: tuple[str, ...]
    bits: int
    is_float: bool
    strategy: str  # "tensor", "channel", "group" or "block"
    group: int
    block: tuple[int, int]
    symmetric: bool
    int8_inputs: bool
    by_activations: bool

    def refuse(self, reason: str) -> None:
        Settings({}, self.where).refuse("weights", self.strategy, reason)


class CompressedTensors:
    """Raises UnsupportedModelError for settings that are not served."""

    leaves = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight"})
    as_linear = True

    def __init__(self, settings: Settings) -> None:
        form = settings.one_of("format", (PACKED, *PLAIN, "mixed-precision", "dense"), "dense")
        if settings.take("kv_cache_scheme") is not None:
            settings.refuse("kv_cache_scheme", "...", "keys and values are not quantized by a checkpoint's scales")
        sparsity = settings.inner("sparsity_config")
        if sparsity is not None:
            sparsity.one_of("format", ("dense",), "dense")
            sparsity.drop(("ignore", "targets", "registry_requires_subclass", "global_sparsity", "sparsity_structure"))
            sparsity.finish()
        self.ignore = settings.names("ignore")
        groups = settings.inner("config_groups")
        names = [] if groups is None else list(groups)
        self.schemes = [_scheme(one, form) for name in names if (one := groups and groups.inner(name)) is not None]
        settings.drop(_TOP_NOTES)
        settings.finish()
        self._patterns = Patterns(settings.where, UnsupportedModelError)
        self._where = settings.where

    def is_quantized(self, leaves: frozenset[str]) -> bool:
        return "weight_packed" in leaves or "weight_scale" in leaves

    def weight(self, layer: StoredLayer) -> PackedWeight:
        scheme = self._scheme_of(layer)
        leaf = "weight_packed" if scheme.format == PACKED else "weight"
        if leaf not in layer:
            layer.tensor(leaf)
        if scheme.is_float:
            return _float8(layer, scheme)
        if scheme.int8_inputs:
            return _int8(layer, scheme)
        return _affine(layer, scheme)

    def _scheme_of(self, layer: StoredLayer) -> Scheme:
        """A name outweighs a pattern, and that a class."""
        name = layer.stem
        if any(self._is(one, name) for one in self.ignore):
            layer.refuse(layer.any_leaf(), "is quantized, and 'ignore' names its layer")
        for chosen in (
            [name],
            [one for scheme in self.schemes for one in scheme.targets if one.startswith("re:") and self._is(one, name)],
            ["Linear"],
        ):
            found = [scheme for scheme in self.schemes if not set(chosen).isdisjoint(scheme.targets)]
            if len(found) > 1:
                Settings({}, self._where).refuse("config_groups", name, "several groups have this layer")
            if found:
                return found[0]
        layer.refuse(layer.any_leaf(), "is quantized, and no group of config_groups has its layer")

    def _is(self, target: str, name: str) -> bool:
        if target.startswith("re:"):
            return self._patterns.match(target.removeprefix("re:"), name) is not None
        return target == name


def _scheme(group: Settings, form: str) -> Scheme:
    own = group.one_of("format", (PACKED, *PLAIN), None if form in ("mixed-precision", "dense") else form)
    targets = group.names("targets")
    if group.take("output_activations") not in NEUTRAL:
        group.refuse("output_activations", "...", "what a layer gives is not quantized")
    weights = group.inner("weights")
    if weights is None:
        group.refuse("weights", None, "served are groups whose weights are quantized")
    inputs = group.inner("input_activations")
    group.finish()
    kind = weights.one_of("type", ("int", "float"), "int")
    is_float = kind == "float"
    bits = weights.one_of("num_bits", (8,) if is_float else (4, 8, 2, 3, 5, 6, 7) if own == PACKED else (8, 4), 8)
    size = weights.take("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), inferred)
    if (strategy == "group") != (size not in (None, -1)) or (strategy == "group" and type(size) is not int):
        weights.refuse("group_size", size, f"strategy is {strategy!r}")
    symmetric = weights.flag("symmetric", True)
    if is_float and (not symmetric or own == PACKED):
        weights.refuse("symmetric", symmetric, "8-bit floats have no zero points and are not packed")
    weights.one_of("dynamic", (False,), False)
    order = weights.one_of("actorder", _ORDERS, False)
    if is_float and order in _ELSEWHERE:
        weights.refuse("actorder", order, "8-bit floats are served with groups of neighbours")
    block = _block(weights, strategy)
    weights.drop(_NOTES)
    weights.finish()
    int8_inputs = inputs is not None and _int8_inputs(inputs)
    if int8_inputs and (is_float or bits != 8 or not symmetric or strategy not in ("tensor", "channel")):
        assert inputs is not None
        inputs.refuse("num_bits", 8, "inputs of 8 bits are served with symmetric weights of 8, a scale a channel")
    return Scheme(
        group.where,
        own,
        tuple(targets),
        bits,
        is_float,
        strategy,
        size or 0,
        block,
        symmetric,
        int8_inputs,
        order in _ELSEWHERE,
    )


def _block(weights: Settings, strategy: str) -> tuple[int, int]:
    given: Any = weights.take("block_structure")
    if isinstance(given, str):
        given = [int(one) for one in given.split("x") if one.isdigit()]
    if strategy != "block":
        if given is not None:
            weights.refuse("block_structure", given, f"strategy is {strategy!r}")
        return 0, 0
    if not isinstance(given, list) or len(given) != 2 or not all(type(one) is int and one > 0 for one in given):
        weights.refuse("block_structure", given, "it must be numbers of rows and of columns")
    return given[0], given[1]


def _int8_inputs(inputs: Settings) -> bool:
    """Whether they are quantized: to int8, each token by itself, as it comes."""
    reason = (
        "what layers are given is served as it is, or as int8 with a scale that is each token's own (dynamic); take a "
        "checkpoint whose weights alone are quantized"
    )
    for name, served, default in (
        ("type", "int", "int"), ("num_bits", 8, 8), ("dynamic", True, False), ("symmetric", True, True),
        ("strategy", "token", None),
    ):  # fmt: skip
        value = inputs.take(name, default)
        if value != served:
            inputs.refuse(name, value, reason)
    inputs.one_of("actorder", (False,), False)
    inputs.drop((*_NOTES, "block_structure"))
    inputs.finish()
    return True


def _scales(layer: StoredLayer, scheme: Scheme, groups: int) -> None:
    one = [(1,), (), (1, 1)] if scheme.strategy == "tensor" else []
    channel = [(layer.rows, 1), (layer.rows,)] if scheme.strategy == "channel" else []
    layer.expect("weight_scale", [*one, *channel, (layer.rows, groups)], FLOATS)


def _check_shape(layer: StoredLayer) -> tuple[str, ...]:
    """weight_shape says what everything else says."""
    if "weight_shape" not in layer:
        return ()
    shape = layer.expect("weight_shape", [(2,)], (torch.int64, torch.int32))
    if shape.tolist() != [layer.rows, layer.columns]:
        layer.refuse("weight_shape", f"is {shape.tolist()}, config.json asks for {[layer.rows, layer.columns]}")
    return ("weight_shape",)


def _affine(layer: StoredLayer, scheme: Scheme) -> PackedWeight:
    n, k, bits = layer.rows, layer.columns, scheme.bits
    if scheme.strategy == "block":
        scheme.refuse("blocks are served of 8-bit floats")
    group = min(scheme.group, k) if scheme.strategy == "group" else k
    groups = -(-k // group)
    packed = scheme.format == PACKED
    if packed:
        layer.expect("weight_packed", [(n, codes.words_of(k, bits))], _INT)
    else:
        layer.expect("weight", [(n, k)], (torch.int8,))
    _scales(layer, scheme, groups)
    leaves = ["weight_packed" if packed else "weight", "weight_scale"]
    if not scheme.symmetric:
        leaves.append("weight_zero_point")
        if packed and scheme.strategy != "tensor":
            layer.expect("weight_zero_point", [(codes.words_of(n, bits), groups)], _INT)
        else:
            layer.expect("weight_zero_point", [(n, groups), (n,), (1,), (), (1, 1)], (torch.int8,))
    unread = _check_shape(layer)
    aux = None
    if "weight_g_idx" in layer or (scheme.by_activations and groups > 1):
        unread, aux = (*unread, "weight_g_idx"), layer.order("weight_g_idx", group, groups)
    elif "weight_zero_point" in layer and scheme.symmetric:
        layer.refuse("weight_zero_point", "is there, and its settings say symmetric")
    width = codes.width_of(bits)
    layout = RowLayout(RowKind.AFFINE4 if width == 4 else RowKind.AFFINE8, k, group, zeros=not scheme.symmetric)
    make = partial(_affine_rows, bits, n, k, groups, packed)
    return PackedWeight(layout, leaves, make, aux, unread)


def _affine_rows(
    bits: int, n: int, k: int, groups: int, packed: bool, weight: torch.Tensor, scale: torch.Tensor,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    width = codes.width_of(bits)
    centre = codes.CENTRE[width]
    if packed:
        own = codes.codes_from_words(weight, bits, k)
    elif width == 8:
        own = weight.view(torch.uint8) ^ 128
    else:
        own = codes.nibbles((weight + 8).view(torch.uint8) & 15)
    if zero is None:
        return codes.rows(own, scale.reshape(-1, scale.shape[-1] if scale.dim() == 2 else 1).expand(n, groups))
    if zero.dtype is torch.int32:
        numbers = codes.from_words(zero.t().contiguous(), bits, n).t().float() + (centre - (1 << bits - 1))
    else:
        numbers = zero.float() + centre
    return codes.rows(own, _each_row(scale, n, groups), _each_row(numbers, n, groups))


def _each_row(numbers: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """One, [N], [N, 1] or [N, G] numbers as [N, G]."""
    return (numbers if numbers.dim() == 2 else numbers.reshape(-1, 1)).expand(n, groups)


def _int8(layer: StoredLayer, scheme: Scheme) -> PackedWeight:
    n, k = layer.rows, layer.columns
    packed = scheme.format == PACKED
    if packed:
        layer.expect("weight_packed", [(n, codes.words_of(k, 8))], _INT)
    else:
        layer.expect("weight", [(n, k)], (torch.int8,))
    _scales(layer, scheme, 1)
    leaves = ("weight_packed" if packed else "weight", "weight_scale")
    layout = RowLayout(RowKind.INT8_ROWS, k, 0, zeros=False)
    return PackedWeight(layout, leaves, partial(_int8_rows, n, k), None, _check_shape(layer))


def _int8_rows(n: int, k: int, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if weight.dtype is torch.int32:
        weight = (codes.codes_from_words(weight, 8, k) ^ 128).view(torch.int8)
    return codes.int8_rows(weight, _each_row(scale, n, 1))


def _float8(layer: StoredLayer, scheme: Scheme) -> PackedWeight:
    n, k = layer.rows, layer.columns
    rows, columns = {"tensor": (n, k), "channel": (1, k), "group": (1, scheme.group), "block": scheme.block}[
        scheme.strategy
    ]
    rows, columns = min(rows, n), min(columns, k)
    layer.expect("weight", [(n, k)], (torch.float8_e4m3fn,))
    groups = -(-k // columns)
    if scheme.strategy == "block":
        layer.expect("weight_scale", [(-(-n // rows), groups)], FLOATS)
    else:
        _scales(layer, scheme, groups)
    layout = RowLayout(RowKind.TABLE8, k, columns, zeros=False)
    return PackedWeight(layout, ("weight", "weight_scale"), partial(block_rows, n, rows), TABLE, _check_shape(layer))
