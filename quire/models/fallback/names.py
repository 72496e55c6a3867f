"""Which tensors of a checkpoint's files become which parameters: transformers' own tables of conversions, asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch

from quire.checkpoint.weights import StoredPart


class Stored(NamedTuple):
    """renames: a file's name -> the parameter's. parts: parameters that are made of other tensors than their own.
    stacked: a parameter that is made of single experts' tensors, side by side -> their names, by expert."""

    renames: dict[str, str]
    parts: dict[str, StoredPart]
    stacked: dict[str, list[list[str]]]


class _Made(NamedTuple):
    """A conversion: what makes `target` (and more) of which tensors. sources: names, by the converter's pattern."""

    converter: Any
    target: str
    sources: dict[str, list[str]]


def stored_as(module: Any, shapes: Mapping[str, torch.Size]) -> Stored:
    """shapes: of the files' tensors, by name. module: transformers', without weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(module)
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = module.state_dict(), module.base_model_prefix
    renames: dict[str, str] = {}
    collected: dict[str, _Made] = {}
    for name in sorted(shapes, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if new not in known and name in known:
            new, pattern = rename_source_key(name, [], [], prefix, known)
        if pattern is None or new not in known:
            renames[name] = new
            continue
        made = collected.setdefault(new, _Made(by_pattern[pattern], new, {}))
        made.sources.setdefault(pattern, []).append(name)
    parts: dict[str, StoredPart] = {}
    stacked: dict[str, list[list[str]]] = {}
    for made in collected.values():
        parts.update(_parts(module, made, shapes))
        if _is_stack(made):
            stacked[made.target] = [made.sources[pattern] for pattern in made.converter.source_patterns]
    return Stored(renames, parts, stacked)


def _is_stack(made: _Made) -> bool:
    """Whether it puts experts behind one another, and what each has of several tensors side by side."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(one), getattr(one, "dim", None)) for one in made.converter.operations]
    whole = set(made.sources) == set(made.converter.source_patterns)
    return whole and kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _parts(module: Any, made: _Made, shapes: Mapping[str, torch.Size]) -> dict[str, StoredPart]:
    """Of one conversion, each parameter that it makes."""
    sources = [name for names in made.sources.values() for name in names]
    stored = {name: shapes[name] for name in sources}
    whole = _Once(partial(_convert, module, made))
    return {target: StoredPart(stored, partial(_one, whole, target)) for target in _targets(made)}


def _targets(made: _Made) -> list[str]:
    """The names of what a conversion makes. Several replace the first of the converter's in the name."""
    first, *others = made.converter.target_patterns
    return [made.target, *(made.target.replace(first, other) for other in others)]


class _Once:
    """Remembers the last result, for as long as several parameters in turn are made of the same tensors."""

    _last = threading.Lock(), {}  # type: ignore[var-annotated]  # of all conversions: one at a time is kept

    def __init__(self, make: Callable[..., dict[str, torch.Tensor]]) -> None:
        self._make = make

    def __call__(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        lock, kept = self._last
        with lock:
            if id(self) not in kept:
                kept.clear()
                kept[id(self)] = self._make(*tensors)
            return kept[id(self)]


def _one(whole: _Once, target: str, *tensors: torch.Tensor) -> torch.Tensor:
    return whole(*tensors)[target]


def _convert(module: Any, made: _Made, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    converter = deepcopy(made.converter)
    given = iter(tensors)
    for pattern, names in made.sources.items():
        for name in names:
            tensor = next(given)
            converter.add_tensor(made.target, name, pattern, lambda tensor=tensor: tensor)
    converted = converter.convert(made.target, model=module, config=module.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in converted.items()}


def take_apart(
    stored: Stored,
    shapes: Mapping[str, torch.Size],
    wanted: Iterable[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], int, int, bool]],
) -> None:
    """Put single experts' parameters in the place of those of all experts; `wanted`: as `experts.slices` says."""
    names = {new: name for name, new in stored.renames.items()}
    used: set[str] = set()
    for name, fused, take, expert, place, plain in wanted:
        lists = stored.stacked.get(fused)
        if plain and lists is not None and place < len(lists) and expert < len(lists[place]):
            stored.renames[lists[place][expert]] = name
        elif fused in stored.parts:
            whole = stored.parts[fused]
            stored.parts[name] = StoredPart(whole.shapes, partial(_taken, take, whole.make))
        elif fused in names:
            stored.parts[name] = StoredPart({names[fused]: shapes[names[fused]]}, take)
        used.add(fused)
    for fused in used:
        stored.parts.pop(fused, None)
        stored.renames.pop(names.get(fused, ""), None)


def _taken(
    take: Callable[[torch.Tensor], torch.Tensor], make: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    return take(make(*tensors))
