"""One model's layers computed by several processes, one after the other: a pipeline of stages.

A stage has some of the layers, their weights, their part of every block of the pool. Layers stay as they are, and so do
their sums: numbers have the very bits that they have in one process. The first stage has the embeddings and the towers
too, the last one the projection to the vocabulary, and draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.pipe import Pipe


@dataclass(frozen=True)
class Stage:
    """A process's place in a pipeline. number: from 0."""

    number: int
    count: int
    pipe: Pipe

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def own(self, layers: int) -> range:
        """This stage's of so many layers, as equal as they go; the last stages, which have more besides, get none of
        those that are left over."""
        each, over = divmod(layers, self.count)
        first = self.number * each + min(self.number, over)
        return range(first, first + each + (self.number < over))
