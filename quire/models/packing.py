"""A loaded model's weights in the form that its CPU multiplies by fastest; see `kernels/packed.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quire.kernels import backend_of, packed
from quire.layers import Embedding, Linear
from quire.layers.shards import SharedRows
from quire.layers.weight_formats import FLOAT_ROWS
from quire.models.base import CausalLM

# Bytes of all weights that can be packed. What stays in a processor's cache, one token at a time reads faster as rows.
LEAST = 64 << 20

# Packages whose models look at a Linear's weight in `loaded` alone, or in classes with `packs = False`.
_KNOWN = {"quire", "torch", "abc", "builtins"}


def pack_weights(model: CausalLM) -> None:
    """Pack the weights of a model's linear layers where they lie, before anything has looked them up.

    Left as they are: a model of small weights, with quantized ones, or of a plug-in that does not say `packs_weights`;
    of others, what a CPU's kernel would not be faster with, and what two modules share, unless the other one is the
    table of tokens.
    """
    own = all(kind.__module__.partition(".")[0] in _KNOWN for kind in type(model).__mro__)
    if model.quantization is not None or not (own or model.packs_weights):
        return
    found = list(_packable(model))
    if sum(layer.weight.nbytes for _, layer in found) >= LEAST:
        _pack(model, found)


@contextmanager
def as_rows(model: CausalLM) -> Iterator[None]:
    """Within, a model's packed weights have their shape of rows, to be read again; then they are packed again.

    After an error they have their shape alone: whoever failed reads them all once more, and no memory is written to.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and packed.is_form(module.weight.shape, module.in_features)
    ]
    for _, layer in found:
        layer.weight.data = packed.memory(layer.weight.data)
    try:
        yield
    except BaseException:
        for _, layer in found:
            layer.weight.data = packed.as_packed(layer.weight.data)
        raise
    _pack(model, found)


def _pack(model: CausalLM, layers: list[tuple[str, Linear]]) -> None:
    for name, layer in layers:
        weight = layer.weight.data
        layer.weight.data = backend_of(weight).pack(weight, model.rows_read.get(f"{name}.weight"))


def _packable(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    users: defaultdict[int, list[nn.Module]] = defaultdict(list)  # by where a parameter lies
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[parameter.data_ptr()].append(module)
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or not module.packs or name in model.elsewhere:
            continue
        format = module.format.inner if isinstance(module.format, SharedRows) else module.format
        weight = module.weight.data
        can_pack = getattr(backend_of(weight), "can_pack", None)  # which a GPU's back end has not
        alone = all(one is module or _is_table_of(one, module) for one in users[weight.data_ptr()])
        if format is FLOAT_ROWS and alone and can_pack and can_pack(weight):
            yield name, module


def _is_table_of(module: nn.Module, projection: Linear) -> bool:
    """Whether a module looks up the rows of a projection, in whatever form they are."""
    return type(module) is Embedding and module.weight is projection.weight
