"""A loaded model's weights in the form that its CPU multiplies by fastest; see `kernels/packed.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from quire.kernels import packed
from quire.layers import Linear
from quire.layers.shards import SharedRows
from quire.layers.weight_formats import FLOAT_ROWS
from quire.models.base import CausalLM

# Bytes. Weights that stay in a processor's cache are read the faster as rows, by one token at a time.
LEAST = 64 << 20


def pack_weights(model: CausalLM) -> None:
    """Pack the weights of a model's linear layers where they lie, before anything has looked them up.

    Left as they are: a model of small weights or with quantized ones; of others, what a CPU's kernel would not be
    faster with, and what two modules share.
    """
    if model.quantization is not None:
        return
    found = list(_packable(model))
    if sum(layer.weight.nbytes for _, layer in found) < LEAST:
        return
    for name, layer in found:
        layer.weight.data = packed.pack(layer.weight.data, model.rows_read.get(f"{name}.weight"))


def unpacked(model: CausalLM, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's parameters, by name, with the memory of the packed ones as [out_features, in_features], to be filled
    again. Then `pack_again`."""
    names = {f"{name}.weight" for name, _ in _packed(model)}
    return {name: packed.memory(one.data) if name in names else one for name, one in tensors.items()}


def pack_again(model: CausalLM) -> None:
    """Pack the weights that were packed before they were filled again."""
    for name, layer in _packed(model):
        packed.pack(packed.memory(layer.weight.data), model.rows_read.get(f"{name}.weight"))


def _packed(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear) and packed.is_packed(module.weight):
            yield name, module


def _packable(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    takers = Counter(
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or not type(module).packs or name in model.elsewhere:
            continue
        own = module.format.inner if isinstance(module.format, SharedRows) else module.format
        weight = module.weight
        if own is FLOAT_ROWS and takers[weight.data_ptr()] == 1 and packed.can_pack(weight.data):
            yield name, module
