"""From a configuration to transformers' module with quire's layers in it, and what was found out about it."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import PagedAttention
from quire.models.fallback.choices import Make, choose, is_conv1d
from quire.models.fallback.construct import construct
from quire.models.fallback.experts import RoutedExperts, is_experts, routed, shape_of
from quire.models.fallback.parts import Activation, FlatEmbedding, FlatLayerNorm, FlatLinear, FlatRMSNorm
from quire.models.fallback.positions import RotaryTables, is_rotary
from quire.models.fallback.probe import Findings, go_through
from quire.models.fallback.stand_ins import StandInExperts, StandInLinear, StandInRows, StandInTable
from quire.models.fallback.top import Top
from quire.types import KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SMALL = 1 << 16  # numbers of a parameter that a stand-in has as they are drawn


class Promise(NamedTuple):
    """By whose means a model's bits do not depend on company. quire: what its kernels do. torch: its sums along rows.
    by_row: whether functions that torch does not round exactly are done row by row, or by kernels."""

    quire: tuple[str, ...]
    torch: tuple[str, ...]
    by_row: bool

    def __str__(self) -> str:
        rows = f"torch's own, row by row: {', '.join(self.torch)}" if self.torch else "of torch's no sums"
        also = "; its functions that are not exact by themselves are done row by row" if self.by_row else ""
        rest = "the rest are torch's exactly rounded operations"
        return f"quire's: {', '.join(self.quire)}; {rows}; {rest}{also}."


@dataclass
class Build:
    """module: with quire's layers, without weights; bare: as transformers makes it. by_row: it runs within `RowExact`.
    plain_top: scores are the projection's. transposed: patterns of weights that files have [in, out]. promise: what
    is quire's and what torch's."""

    module: Any
    bare: Any
    layers: Sequence[PagedAttention]
    kv_spec: KVSpec
    by_row: bool
    plain_top: bool
    transposed: tuple[str, ...]
    promise: Promise


def build(config: PretrainedConfig, kind: Any) -> Build:
    """Raises UnsupportedModelError for a module that would not be right, with the reason."""
    with torch.device("cpu"):  # the loader's is meta
        return _build(config, kind)


def _build(config: PretrainedConfig, kind: Any) -> Build:
    bare = construct(config, kind)
    head = bare.get_output_embeddings()
    if not isinstance(head, nn.Linear) and not is_conv1d(head):
        raise UnsupportedModelError(f"{kind.__name__}: its projection to the vocabulary is no linear layer.")
    chosen = _choices(bare, head)
    findings, by_row = _look(bare, chosen)
    module = copy.deepcopy(bare)
    made = _replace(module, bare, chosen, findings)
    try:
        kv_spec = KVSpec.of(findings.specs)
    except ValueError as error:
        raise UnsupportedModelError(f"{kind.__name__}: {error}") from error
    return Build(
        module, bare, [PagedAttention.from_spec(spec) for spec in findings.specs], kv_spec, by_row,
        not findings.in_top,
        tuple(re.escape(f"{name}.weight") for name, part in bare.named_modules() if is_conv1d(part)),
        _promise(made, findings, by_row),
    )  # fmt: skip


def _choices(bare: Any, head: nn.Module) -> dict[str, Make]:
    """By name, what is to stand where. What is inside of such a part is not looked at."""
    chosen: dict[str, Make] = {}
    for name, part in bare.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in _outers(name, chosen))
        if name and not inside:
            make = partial(routed, part) if is_experts(part) else choose(part, head)
            if make is not None:
                chosen[name] = make
    return chosen


def _outers(name: str, chosen: dict[str, Make]) -> list[str]:
    parts = name.split(".")
    return [outer for end in range(1, len(parts)) if (outer := ".".join(parts[:end])) in chosen]


def _look(bare: Any, chosen: dict[str, Make]) -> tuple[Findings, bool]:
    """Go through a step of stand-ins, within `RowExact` if it has to be."""
    findings = go_through(*_stand_in(bare, chosen), by_row=False)
    if not findings.unsafe:
        return findings, False
    findings = go_through(*_stand_in(bare, chosen), by_row=True)
    if findings.unsafe:
        shown = "; ".join(f"{what} ({place})" for what, place in list(findings.unsafe.items())[:4])
        raise UnsupportedModelError(
            f"{type(bare).__name__} computes by torch what depends on what shares the batch: {shown}. A model's class "
            "of quire's layers would serve it: see docs/adding-a-model.md."
        )
    return findings, True


def _stand_in(bare: Any, chosen: dict[str, Make]) -> tuple[Any, Top, set[int]]:
    """(a copy with stand-ins for all that is large, its halves, all sizes that occur)"""
    sizes = {size for parameter in bare.parameters() for size in parameter.shape}
    sizes |= {value for value in vars(bare.config.get_text_config()).values() if type(value) is int}
    module = copy.deepcopy(bare)
    for name in chosen:
        part = module.get_submodule(name)
        stand_in: Any = _stand_in_for(part)
        stand_in.path = name
        _set(module, name, stand_in)
    for path, part in module.named_modules():
        if is_rotary(part):
            _set(module, path, RotaryTables(part))
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                part._parameters[leaf] = nn.Parameter(_drawn(parameter, generator), requires_grad=False)
        for leaf, buffer in part._buffers.items():
            # What nobody fills stays as it is: a step that reads it fails.
            if buffer is not None and buffer.is_meta and leaf not in part._non_persistent_buffers_set:
                part._buffers[leaf] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return module, Top(module), sizes


def _drawn(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers for a parameter: of a large one, a row again and again, which takes no memory."""
    shape = parameter.shape if parameter.numel() <= _SMALL else parameter.shape[-1:]
    return torch.rand(shape, generator=generator, device="cpu").add_(0.5).expand(parameter.shape)


def _stand_in_for(part: Any) -> nn.Module:
    marks: Any = None  # the probe sets it
    if is_experts(part):
        shape_of(part)
        return StandInExperts(marks, part)
    if isinstance(part, nn.Embedding):
        return StandInTable(marks, part)
    if is_conv1d(part):
        return StandInLinear(marks, part.nx, part.nf)
    if isinstance(part, nn.Linear):
        return StandInLinear(marks, part.in_features, part.out_features)
    return StandInRows(marks, part)


def _replace(module: Any, bare: Any, chosen: dict[str, Make], findings: Findings) -> list[nn.Module]:
    made: list[nn.Module] = []
    with torch.device("meta"):
        for name, make in chosen.items():
            part = make()
            if isinstance(part, (FlatRMSNorm, FlatLayerNorm)):
                part.heads_first = name in findings.heads_first
            _set(module, name, part)
            made.append(part)
    for path, part in list(module.named_modules()):
        for leaf, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta and leaf in part._non_persistent_buffers_set:
                part._buffers[leaf] = None  # no step reads it
        if is_rotary(part):
            _set(module, path, RotaryTables(part))
    return made


def _set(module: Any, name: str, part: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path) if path else module
    owner._modules[leaf] = part


def _promise(made: Sequence[nn.Module], findings: Findings, by_row: bool) -> Promise:
    kinds: dict[str, Any] = {
        "products": FlatLinear, "tables": FlatEmbedding, "norms": (FlatRMSNorm, FlatLayerNorm),
        "activations": Activation, "experts": RoutedExperts,
    }  # fmt: skip
    own = [name for name, kind in kinds.items() if any(isinstance(part, kind) for part in made)]
    return Promise(("attention", *own), tuple(sorted(findings.rows)), by_row)
