"""A checkpoint whose tensors have other names than its model's: saved without the beginning that they have beside a
head, say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.checkpoint.files import Checkpoint
from quire.errors import CheckpointError


class RenamedCheckpoint(Checkpoint):
    """The tensors of `base`, each by the name that `renamed` gives for its own. Raises CheckpointError for two of one
    name."""

    def __init__(self, base: Checkpoint, renamed: Callable[[str], str]) -> None:
        self.directory = base.directory
        self._base = base
        self._stored: dict[str, str] = {}
        for stored in base.names():
            other = self._stored.setdefault(renamed(stored), stored)
            if other != stored:
                raise CheckpointError(f"{base.directory}: {other!r} and {stored!r} are both {renamed(stored)!r}.")

    def names(self) -> Iterator[str]:
        yield from self._stored

    def tensor(self, name: str) -> torch.Tensor:
        return self._base.tensor(self._stored[name])

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        self._base.read(self._stored[name], out, first)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._base.shapes()
        return {name: shapes[stored] for name, stored in self._stored.items()}

    def file_of(self, name: str) -> str:
        return self._base.file_of(self._stored[name])

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        return self._base.stamp()
