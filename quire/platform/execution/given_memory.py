"""The memory of weights and KV blocks, given back to the system and taken again.

Weights are read again from the checkpoint's files, which a CPU's would have to leave anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quire import huge_pages
from quire.checkpoint.files import Checkpoint
from quire.checkpoint.opening import open_checkpoint
from quire.errors import CheckpointError, QuireError
from quire.kernels import packed
from quire.models.base import CausalLM
from quire.models.loader import fill_again
from quire.platform.execution.model_runner import ModelRunner


class GivenMemory:
    """What models, each with the path that it was read from, and their runner's blocks take. Only while nothing
    runs."""

    def __init__(self, models: Sequence[tuple[CausalLM, Path]], runner: ModelRunner, load_format: str) -> None:
        self._models = models
        self._runner = runner
        self._load_format = load_format
        self._checkpoints: list[Checkpoint] = []
        self._take_blocks: Callable[[], None] | None = None
        self._take_weights: list[Callable[[], None]] = []
        self._size = 0  # bytes of the weights

    def check(self) -> None:
        """Raise QuireError where the system takes no memory back, CheckpointError where the weights could not be read
        again."""
        if not all(map(huge_pages.can_release, self._blocks_of_weights())):
            raise QuireError("this system takes no memory back from a process that goes on: end the engine instead.")
        checkpoints = [open_checkpoint(path, self._load_format) for _, path in self._models]
        self._check_same(checkpoints)
        self._checkpoints = checkpoints

    def give_back(self) -> None:
        """Give weights and blocks back, after `check`."""
        weights = self._blocks_of_weights()
        self._size = sum(one.untyped_storage().nbytes() for one in weights)
        if self._runner.device.type == "cpu":  # a GPU has no room for what is not read
            self._size -= sum(_unread_bytes(model) for model, _ in self._models)
        self._take_blocks = self._runner.release_cache()
        self._take_weights = [huge_pages.release(one) for one in weights]
        self._runner.forget_recordings()
        gc.collect()
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def take_blocks(self) -> None:
        """Take the blocks' memory again; there is nothing in it."""
        assert self._take_blocks is not None
        self._take_blocks()

    def read_weights(self) -> None:
        """Read the weights again, unless that was done: of several processes, another may have failed. Raises
        CheckpointError where they cannot be read or are others now."""
        checkpoints = self._checkpoints
        if not checkpoints:
            return
        self._check_same(checkpoints)
        available = huge_pages.available_bytes(self._runner.device)
        if self._size > available:
            raise CheckpointError(
                f"{self._models[0][1]}: the weights take {self._size:,} bytes, and {available:,} are available: free "
                "some."
            )
        for take in self._take_weights:
            take()
        for (model, _), checkpoint in zip(self._models, checkpoints, strict=True):
            fill_again(model, checkpoint)
        self._checkpoints = []

    def _check_same(self, checkpoints: Sequence[Checkpoint]) -> None:
        for (model, path), checkpoint in zip(self._models, checkpoints, strict=True):
            if checkpoint.stamp() != model.read_from:
                raise CheckpointError(
                    f"{path}: its files have changed since the engine read them, and it would wake up as another "
                    "model: load that in an engine of its own."
                )

    def _blocks_of_weights(self) -> list[torch.Tensor]:
        """One tensor for each block of memory that weights lie in, or what was made of them."""
        weights = [one for model, _ in self._models for one in (*model.parameters(), *model.derived)]
        return list({one.untyped_storage().data_ptr(): one for one in weights if one.numel()}.values())


def _unread_bytes(model: CausalLM) -> int:
    """Of parameters of which some rows alone are read, or none."""
    parameters, unread = dict(model.named_parameters()), 0
    for name, (first, end) in model.rows_read.items():
        weight = parameters.get(name)
        if weight is not None and weight.numel():
            unread += weight.nbytes - weight.nbytes // packed.num_rows(weight.shape) * (end - first)
    return unread
