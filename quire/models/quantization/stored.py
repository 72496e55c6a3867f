"""What a method of quantization says of one layer: which stored tensors its weight is made of, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from quire.checkpoint.files import Checkpoint
from quire.errors import CheckpointError
from quire.kernels.quantized import RowLayout

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Rows of bytes in the making.

    layout: what they mean. leaves: of the tensors that `make` takes, in its order: "qweight". make: of these, the rows
    [N, row_bytes] uint8. aux: a table of numbers or columns' groups, as `QuantizedWeight` has it; it is small, so
    that it is read beforehand. unread: leaves that were looked at, and are no part of the rows.
    """

    layout: RowLayout
    leaves: Sequence[str]
    make: Callable[..., torch.Tensor]
    aux: torch.Tensor | None = None
    unread: Sequence[str] = ()


class StoredLayer:
    """A layer's tensors in the files: `stem`.qweight and so on. rows, columns: of its weight."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], stem: str, rows: int, columns: int) -> None:
        """names: the files' name for each leaf that they have."""
        self._checkpoint = checkpoint
        self._names = names
        self.stem, self.rows, self.columns = stem, rows, columns

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._names

    def any_leaf(self) -> str:
        """One that it has, for messages."""
        return next(iter(self._names))

    def tensor(self, leaf: str) -> torch.Tensor:
        """A stored tensor, of which nothing is read yet. Raises CheckpointError, which says that it is missing."""
        if leaf not in self._names:
            raise CheckpointError(f"{self._checkpoint.directory}: {self.stem}.{leaf} is missing.")
        return self._checkpoint.tensor(self._names[leaf])

    def expect(self, leaf: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """As `tensor`, of one of these shapes and dtypes. Raises CheckpointError."""
        found = self.tensor(leaf)
        if tuple(found.shape) not in shapes:
            asked = " or ".join(str(one) for one in shapes)
            self.refuse(leaf, f"has shape {tuple(found.shape)}, its settings ask for {asked}")
        if found.dtype not in dtypes:
            asked = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            self.refuse(leaf, f"is of dtype {str(found.dtype).removeprefix('torch.')}, its settings ask for {asked}")
        return found

    def order(self, leaf: str, group: int, groups: int) -> torch.Tensor | None:
        """Each column's group [K] int32, or None where they follow from the columns' places. Raises CheckpointError."""
        order = self.expect(leaf, [(self.columns,)], (torch.int32,))
        if torch.equal(order, torch.arange(self.columns, dtype=torch.int32) // group):
            return None
        if order.min() < 0 or order.max() >= groups:
            self.refuse(leaf, f"names groups from {order.min()} to {order.max()}, and there are {groups}")
        return order.clone()

    def refuse(self, leaf: str, why: str) -> NoReturn:
        file = self._checkpoint.file_of(self._names[leaf])
        raise CheckpointError(f"{self._checkpoint.directory}: {self.stem}.{leaf} in {file} {why}.")


class Method(Protocol):
    """One method of quantization with a checkpoint's settings of it, which have been checked."""

    leaves: frozenset[str]  # of all tensors that a quantized layer may have, but for its bias
    as_linear: bool  # `weight` lies as the module that was quantized has it, which may be [in, out]

    def is_quantized(self, leaves: frozenset[str]) -> bool:
        """Whether a layer of which the files have these tensors is quantized, rather than left as it was."""

    def weight(self, layer: StoredLayer) -> PackedWeight:
        """A quantized layer's weight. Raises CheckpointError, UnsupportedModelError."""


__all__ = ["FLOATS", "Method", "PackedWeight", "StoredLayer"]
