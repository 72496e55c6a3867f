"""Which tensor of a checkpoint fills which place of a model: names are matched strictly, both ways.

Nothing is missing, nothing is left over, every shape and dtype fits, or the load is refused with the list.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quire.checkpoint.files import Checkpoint, listed
from quire.checkpoint.weights import StoredPart, StoredWeight
from quire.errors import CheckpointError

logger = logging.getLogger("quire")

# A tensor of any of these may be cast to the model's dtype; integers and 8-bit floats are no plain weights.
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Place:
    """What one tensor fills. dtype: its own; None: the model's. optional: it has numbers, should no file bring any."""

    shape: torch.Size
    dtype: torch.dtype | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class NameRules:
    """How a model's names differ from the files'; see the attributes of `CausalLM` with these names.

    owner: whose they are, for messages. exact: names that are known one by one, before all patterns. tied: parameter ->
    whose tensor it shares; of a pair one may be absent. parts: place -> what of which tensors fills it.
    """

    owner: str
    renames: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()
    transposed: Sequence[str] = ()
    tied: Mapping[str, str] | None = None
    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, stored: str) -> str:
        if stored in self.exact:
            return self.exact[stored]
        for pattern, replacement in self.renames:
            match = re.fullmatch(pattern, stored)
            if match:
                return match.expand(replacement)
        return stored

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def is_transposed(self, name: str, place: Place) -> bool:
        return len(place.shape) == 2 and any(re.fullmatch(pattern, name) for pattern in self.transposed)


@dataclass(frozen=True, slots=True)
class Matches:
    """What to read. shares: place that no tensor fills -> the place whose tensor it takes."""

    wanted: Sequence[StoredWeight]
    shares: Mapping[str, str]


def match_tensors(checkpoint: Checkpoint, places: Mapping[str, Place], rules: NameRules) -> Matches:
    """Match a checkpoint's tensors with places, by name; none of them is read. Raises CheckpointError."""
    source, unused = _match_names(checkpoint, places, rules)
    pairs = rules.tied or {}
    partner = {**pairs, **{shared: name for name, shared in pairs.items()}}  # the absent one takes the other's
    required = [name for name, place in places.items() if not place.optional]
    _report(checkpoint, rules, [n for n in required if n not in source and partner.get(n) not in source], unused)
    wanted = {
        name: StoredWeight(
            name,
            stored,
            places[name].shape,
            rules.is_transposed(name, places[name]),
            places[name].dtype,
            rules.parts.get(name),
        )
        for name, stored in source.items()
    }
    _check_tensors(checkpoint, wanted.values())
    for name, shared in pairs.items():
        if name in wanted and shared in wanted and _is_tied(checkpoint, wanted[name], wanted[shared]):
            del wanted[name]
    shares = {name: partner[name] for name in required if name not in wanted}
    return Matches(list(wanted.values()), shares)


def _match_names(
    checkpoint: Checkpoint, places: Mapping[str, Place], rules: NameRules
) -> tuple[dict[str, str], list[str]]:
    """Return (place -> the checkpoint's name for it, names that belong to none)."""
    source = {place: place for place, part in rules.parts.items() if not part.shapes}  # which need no tensor
    seen: dict[str, str] = {}
    unused = []
    stacked: dict[str, list[str]] = {}
    for place, part in rules.parts.items():
        for stored in part.shapes:
            stacked.setdefault(stored, []).append(place)
    for stored in checkpoint.names():
        name = rules.renamed(stored)
        if name in seen:
            raise CheckpointError(f"{checkpoint.directory}: {seen[name]!r} and {stored!r} are both {name!r}.")
        if name in stacked or name in places:
            seen[name] = stored
        if name in stacked:
            source.update(dict.fromkeys(stacked[name], stored))
        elif name in places and name not in rules.parts:
            source[name] = stored
        elif not rules.is_ignored(name):
            unused.append(stored)
    return source, unused


def _report(checkpoint: Checkpoint, rules: NameRules, missing: list[str], unused: list[str]) -> None:
    parts = [f"missing: {listed(missing)}"] if missing else []
    parts += [f"of no use: {listed(unused)}"] if unused else []
    if parts:
        raise CheckpointError(f"{checkpoint.directory}: not the tensors of {rules.owner}; {'; '.join(parts)}.")


def _check_tensors(checkpoint: Checkpoint, wanted: Iterable[StoredWeight]) -> None:
    """Every tensor has the shape and a dtype that its place can take."""
    problems: list[str] = []
    names = set(checkpoint.names())
    for one in wanted:
        if one.part is not None:
            problems += _problems_of_parts(checkpoint, one.part, names)
            continue
        tensor = checkpoint.tensor(one.stored)
        if one.transposed:
            tensor = tensor.t()
        if tensor.shape != one.shape:
            problem = f"has shape {tuple(tensor.shape)}, config.json asks for {tuple(one.shape)}"
        elif one.dtype is not None and not one.dtype.is_floating_point:
            if tensor.dtype is one.dtype:
                continue
            problem = f"is of dtype {_short(tensor.dtype)}, and the model's buffer is of {_short(one.dtype)}"
        elif tensor.dtype not in _CASTABLE:
            problem = f"is of dtype {_short(tensor.dtype)}, no floating-point weight"
        else:
            continue
        problems.append(f"{one.stored} in {checkpoint.file_of(one.stored)} {problem}")
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: tensors that do not fit: {listed(problems)}.")


def _problems_of_parts(checkpoint: Checkpoint, part: StoredPart, names: Collection[str]) -> Iterator[str]:
    for name, shape in part.shapes.items():
        if name not in names:
            yield f"{name}, which is missing"
            continue
        tensor = checkpoint.tensor(name)
        fits = tensor.dtype in part.dtypes.get(name, _CASTABLE)
        if not part.fits(name, tensor.shape):
            asked = f"has shape {tuple(tensor.shape)}, config.json asks for {tuple(shape)}"
            yield f"{name} in {checkpoint.file_of(name)} {asked}"
        elif not fits:
            yield f"{name} in {checkpoint.file_of(name)} is of dtype {_short(tensor.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_tied(checkpoint: Checkpoint, one: StoredWeight, shared: StoredWeight) -> bool:
    """Where the files hold both of a tied pair: one, if they are equal; both, as they are, if not.

    So does transformers: the tensors in the files outweigh the configuration's word.
    """
    pairs = zip(one.tensors, shared.tensors, strict=False)
    if all(torch.equal(checkpoint.tensor(own), checkpoint.tensor(other)) for own, other in pairs):
        return True
    logger.warning("tie_word_embeddings is set, but the files' %s and %s differ: not tied", one.name, shared.name)
    return False
