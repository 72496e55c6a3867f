"""What the kernels of experts read: how tokens choose theirs, and where an experts' layer has its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.kernels.adapters import LoraSegments, LoraTable, check_tables
from quire.kernels.transfer import send

# The rows of csrc/arguments.h's Weight and LoraTable.
WEIGHT = np.dtype([("data", "<u8"), ("bias", "<u8"), ("rows", "<i8")])
_TABLE = np.dtype([("entries", "<u8"), ("slots", "<i8")])
SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer")  # in the order of arguments.h


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen of its logits, and how much each counts.

    scores: what it is chosen by and counts: "softmax" or "sigmoid" of all logits; "softmax_of_chosen" or
    "sigmoid_of_chosen": chosen by the logits themselves; "sparse_mixer": the best by its softmax over those that are
    within `tolerance` of it, then the best of the others (PhiMoE, arXiv:2409.12136). Of equals the lower number.
    groups, top_groups, group_best: experts of the `top_groups` best of so many groups alone (arXiv:2405.04434), a group
    by its best expert, or by the sum of its two best.
    renormalise: shares are divided by their sum + added, which counts as `least` at least; then times `scale`.
    Raises ValueError for what makes no sense.
    """

    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    added: float = 0.0
    least: float = 0.0
    scale: float = 1.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.scores not in SCORES:
            raise ValueError(f"scores: expected one of {', '.join(SCORES)}, got {self.scores!r}")
        if not 1 <= self.top_groups <= self.groups or self.group_best not in (1, 2):
            raise ValueError(
                f"groups={self.groups}, top_groups={self.top_groups}, group_best={self.group_best}: top_groups is from "
                "1 to groups, group_best 1 or 2"
            )

    def numbers(self, experts: int, chosen: int) -> tuple[float, ...]:
        """What the extension's function takes. Raises ValueError where `chosen` of so many experts cannot be."""
        if (
            experts % self.groups
            or experts // self.groups < self.group_best
            or not 1 <= chosen <= experts // self.groups * self.top_groups
        ):
            raise ValueError(
                f"experts: {chosen} of {experts} cannot be chosen in {self.top_groups} of {self.groups} groups"
            )
        return (SCORES.index(self.scores), self.groups, self.top_groups, self.group_best, self.renormalise, self.added,
                self.least, self.scale, self.tolerance)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """The tables of all experts' weights where a GPU's kernels can read them.

    address: of [E, weights] LoraTable. adapted: by weight, whether any expert has one. max_rank: of all.
    """

    address: int
    adapted: Sequence[bool]
    max_rank: int


class ExpertWeights:
    """The weights of E experts, each a list of as many [N_i, K], contiguous, of one dtype; and their biases.

    All experts' lists are of the same shapes. entries: the rows that the kernel reads. rows: N_i of each weight;
    aligned: whether all lie at multiples of 16 bytes. Raises ValueError.
    """

    def __init__(
        self, weights: Sequence[Sequence[torch.Tensor]], biases: Sequence[Sequence[torch.Tensor | None]] | None = None
    ) -> None:
        self.weights = weights
        self.biases = [[None] * len(own) for own in weights] if biases is None else biases
        first = weights[0]
        self.count = len(first)
        self.shapes = [tuple(weight.shape) for weight in first]
        self.dtype, self.device, self.in_features = first[0].dtype, first[0].device, first[0].shape[1]
        self.rows = [shape[0] for shape in self.shapes]
        self.out_features = sum(self.rows)
        self.aligned = all(weight.data_ptr() % 16 == 0 for own in weights for weight in own)
        self._tables: tuple[Any, ...] = ()  # what the device's copy was made of
        entries = np.zeros(len(weights) * self.count, WEIGHT)
        for e, (own, own_biases) in enumerate(zip(weights, self.biases, strict=True)):
            for i, (weight, bias) in enumerate(zip(own, own_biases, strict=True)):
                self._check(f"weights[{e}][{i}]", weight, (self.shapes[i][0], self.in_features))
                if bias is not None:
                    self._check(f"biases[{e}][{i}]", bias, self.shapes[i][:1])
                entries[e * self.count + i] = (
                    weight.data_ptr(), 0 if bias is None else bias.data_ptr(), weight.shape[0],
                )  # fmt: skip
        self.entries = entries
        self.address: int = entries.ctypes.data
        if self.device.type not in ("cpu", "meta"):
            self._mirror = send(torch.from_numpy(entries.view(np.uint8)), self.device)
            self.address = self._mirror.data_ptr()

    def __len__(self) -> int:
        return len(self.weights)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        fits = tuple(tensor.shape) == shape and tensor.dtype is self.dtype and tensor.device == self.device
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected {list(shape)} {self.dtype} on {self.device}, contiguous, got "
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )

    def check_tables(self, tables: Sequence[Sequence[LoraTable | None]]) -> None:
        """Raise ValueError where a table is not its weight's."""
        if len(tables) != len(self.weights):
            raise ValueError(f"tables: expected a list for each of {len(self.weights)} experts, got {len(tables)}")
        for own, weights in zip(tables, self.weights, strict=True):
            check_tables(own, weights, self.in_features, self.dtype)

    def device_tables(self, tables: Sequence[Sequence[LoraTable | None]]) -> DeviceTables:
        """What a GPU's kernels read of tables; the same memory for as long as none of them moves.

        Raises ValueError where a table is not its weight's.
        """
        flat = [table for own in tables for table in own]
        rows = [(0, 0) if table is None else (table.address, len(table.entries)) for table in flat]
        if (flat, rows) != self._tables:
            self.check_tables(tables)
            self._tables = flat, rows
            self._tables_mirror = send(torch.from_numpy(np.array(rows, _TABLE).view(np.uint8)), self.device)
        adapted = [any(table is not None for table in flat[i :: self.count]) for i in range(self.count)]
        max_rank = max((table.max_rank for table in flat if table is not None), default=0)
        return DeviceTables(self._tables_mirror.data_ptr(), adapted, max_rank)


def expert_segments(segments: LoraSegments, tokens: torch.Tensor) -> LoraSegments:
    """Who owns which of one expert's rows, whose tokens are `tokens` [n] int64, ascending."""
    own = tokens.tolist()
    bounds = np.searchsorted(own, [(start, end) for start, end, _, _ in segments.rows] or np.zeros((0, 2)))
    rows = [
        (int(first), int(last), slot, weight)
        for (first, last), (_, _, slot, weight) in zip(bounds, segments.rows, strict=True)
    ]
    return LoraSegments.of(rows, len(own), segments.device)
