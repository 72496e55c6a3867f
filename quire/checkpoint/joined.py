"""A checkpoint whose tensors lie in several folders: a model, and sentence-transformers' layers behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from quire.checkpoint.files import PICKLED, SINGLE, Checkpoint
from quire.checkpoint.modules import MODULES, listed_modules, module_folder

PREFIX = "sentence_dense."  # of the names of their tensors: sentence_dense.0.linear.weight


class JoinedCheckpoint(Checkpoint):
    """The tensors of `base`, and those of others, whose names begin with their keys."""

    def __init__(self, base: Checkpoint, others: Mapping[str, Checkpoint]) -> None:
        self.directory = base.directory
        self._base, self._others = base, others

    def _of(self, name: str) -> tuple[Checkpoint, str]:
        for prefix, other in self._others.items():
            if name.startswith(prefix):
                return other, name[len(prefix) :]
        return self._base, name

    def names(self) -> Iterator[str]:
        yield from self._base.names()
        for prefix, other in self._others.items():
            yield from (prefix + name for name in other.names())

    def tensor(self, name: str) -> torch.Tensor:
        owner, own = self._of(name)
        return owner.tensor(own)

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        owner, own = self._of(name)
        owner.read(own, out, first)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = self._base.shapes()
        for prefix, other in self._others.items():
            found |= {prefix + name: shape for name, shape in other.shapes().items()}
        return found

    def file_of(self, name: str) -> str:
        owner, own = self._of(name)
        return owner.file_of(own)

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        return (*self._base.stamp(), *(one for other in self._others.values() for one in other.stamp()))


def joined(base: Checkpoint) -> Checkpoint:
    """A checkpoint with the tensors of its folders of Dense layers, if it has any. Raises CheckpointError."""
    folders = dense_folders(base.directory)
    if not folders:
        return base
    others = {f"{PREFIX}{number}.": Checkpoint(base.directory / name) for number, name in enumerate(folders)}
    return JoinedCheckpoint(base, others)


def dense_folders(directory: Path) -> list[str]:
    """Names of the folders of Dense layers, in order; those without weights are left to whoever needs them."""
    if not (directory / MODULES).exists():
        return []
    wanted = [one.get("path") for one in listed_modules(directory) if str(one.get("type")).endswith(".Dense")]
    names = [module_folder(directory, name).name for name in wanted]
    return [name for name in names if any((directory / name / one).exists() for one in (SINGLE, PICKLED))]
