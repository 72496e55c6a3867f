"""A model of which a process computes some layers alone; see `layers/stages.py`.

Every stage has the whole model's modules, so that names, settings and adapters mean the same in each. What another
stage computes is not read, and its memory is never touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import Embedding
from quire.layers.stages import Stage
from quire.models.base import CausalLM
from quire.models.pooling.base import PoolingModel
from quire.models.vision.base import MediaModel


def check_stages(model: CausalLM, stage: Stage) -> nn.ModuleList:
    """The layers between which a model can be cut. Raises UnsupportedModelError where it cannot, or not into so many
    parts."""
    layers, kind = model.layers_in_order, type(model).__name__
    whole = isinstance(model, PoolingModel) or model.kv_spec.state is not None
    if layers is None or whole or model.kv_spec.num_layers != len(layers):
        why = "has layers with states" if model.kv_spec.state is not None else "is not cut between its layers"
        raise UnsupportedModelError(f"pipeline_parallel_size={stage.count}: {kind} {why}; take tensor_parallel_size.")
    if len(layers) < stage.count:
        raise UnsupportedModelError(
            f"pipeline_parallel_size={stage.count}: {kind} has {len(layers)} layers here; take as many stages at most."
        )
    levels = model.feature_levels if isinstance(model, MediaModel) else 0
    if levels >= -(-len(layers) // stage.count):  # the last layer of a stage hands on before anything is added
        raise UnsupportedModelError(
            f"pipeline_parallel_size={stage.count}: {kind} adds features of images to its first {levels} layers, which "
            "must be one stage's; take fewer stages."
        )
    return layers


def leave_out(model: CausalLM, stage: Stage) -> None:
    """Have nothing read of what other stages compute, before the model is loaded."""
    layers = check_stages(model, stage)
    own = stage.own(len(layers))
    left_out = [layer for number, layer in enumerate(layers) if number not in own]
    output: nn.Module = getattr(model, "language_model", model).output_projection
    if not stage.is_first:
        within = {id(module) for layer in layers for module in layer.modules()}
        left_out += [
            module
            for name, module in model.named_modules()
            if (isinstance(module, Embedding) and id(module) not in within)
            or (model.is_visual(name) and not any(one is layers for one in module.modules()))
        ]
    if stage.is_last:
        left_out = [module for module in left_out if not _serves_as_output(model, module)]
    else:
        left_out.append(output)
    elsewhere = {id(module) for one in left_out for module in one.modules()}
    model.elsewhere = frozenset(name for name, module in model.named_modules() if id(module) in elsewhere)


def _serves_as_output(model: CausalLM, module: nn.Module) -> bool:
    """Whether the projection to the vocabulary has this table's numbers."""
    tied = {name.rpartition(".")[0] for name in model.tied_weights.values()} if model.is_tied else set()
    return any(model.get_submodule(name) is module for name in tied)


def cut(model: CausalLM, stage: Stage) -> None:
    """Have a loaded model's forward pass go through this stage's layers alone."""
    layers = check_stages(model, stage)
    own = stage.own(len(layers))
    for number, layer in enumerate(layers):
        if number not in own:
            layer.forward = _passed
    if not stage.is_first:
        layers[own[0]].forward = _Arrival(layers[own[0]].forward, stage)
    if not stage.is_last:
        layers[own[-1]].forward = _Departure(layers[own[-1]].forward, stage)
    model.own_layers = own


def _passed(residual: torch.Tensor, x: torch.Tensor | None, *rest: Any) -> torch.Tensor | None:
    """Another stage's layer."""
    return x


class _Arrival:
    """In the place of the first layer's forward pass."""

    def __init__(self, forward: Any, stage: Stage) -> None:
        self._forward, self._stage = forward, stage

    def __call__(self, residual: torch.Tensor, x: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        made: torch.Tensor = self._forward(residual, self._stage.pipe.receive(residual), *rest)
        return made


class _Departure:
    """In the place of the last layer's."""

    def __init__(self, forward: Any, stage: Stage) -> None:
        self._forward, self._stage = forward, stage

    def __call__(self, residual: torch.Tensor, x: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        made: torch.Tensor = self._forward(residual, x, *rest)
        self._stage.pipe.send(residual, made)
        return made
