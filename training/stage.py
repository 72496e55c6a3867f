"""One stage of training: steps of several batches each, computed side by side, with checkpoints.

A stage is deterministic: its batches follow from the step's number, and gradients are summed in the batches' order,
so that the workers' timing changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Elsewhere bf16 is slower than float32: several times where it is emulated, twice with AVX-512's dot products alone.
_FAST_BF16 = torch.cpu._is_amx_tile_supported()


@dataclass(frozen=True)
class Pace:
    """How long a stage goes on, and how fast."""

    steps: int
    learning_rate: float  # of the matrices
    small_rate: float = 0.5  # the same of everything else, as a share of it
    warmup: int = 50
    weight_decay: float = 0.05

    def rate(self, step: int) -> float:
        """A linear warm-up, then a cosine down to nothing."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Stage:
    """What is trained, on what, and towards what.

    recipe: whatever decides the result; a checkpoint of another one is not gone on from.
    batches: of a step's number, the step's batches.
    loss: of a batch, its loss, summed; weight: of a batch, by what the sum of all is divided.
    stop: the stage ends after so many steps, before its pace does.
    """

    name: str
    recipe: dict[str, Any]
    pace: Pace
    model: nn.Module
    batches: Callable[[int], Sequence[Any]]
    loss: Callable[[Any], torch.Tensor]
    weight: Callable[[Any], float]
    stop: int | None = None

    @property
    def steps(self) -> int:
        return self.pace.steps if self.stop is None else self.stop


@dataclass
class Progress:
    """What a checkpoint holds besides the weights and the optimizers."""

    step: int = 0
    seconds: float = 0.0
    processor: float = 0.0  # seconds of processor time, of all threads


def run(stage: Stage, folder: Path, save_every: int, threads: int) -> Progress:
    """Train from the checkpoint, if there is one of this recipe, to the last step."""
    # Each worker takes whole batches and computes in one thread: threads that share a batch wait for each other at
    # every step of it, which is slow when something else uses a core.
    torch.set_num_threads(1)
    parameters = [p for p in stage.model.parameters() if p.requires_grad]
    optimizers = _optimizers(stage)
    checkpoint = folder / f"{stage.name}.pt"
    progress = _resume(stage, optimizers, checkpoint)
    print(f"{stage.name}: {sum(p.numel() for p in parameters):,} parameters, from step {progress.step}", flush=True)
    started, before, running = time.monotonic(), progress.seconds, 0.0
    busy, busy_before = time.process_time(), progress.processor
    with (
        ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers,
        ThreadPoolExecutor(1) as ahead,
    ):
        coming = ahead.submit(stage.batches, progress.step)
        while progress.step < stage.steps:
            batches = coming.result()
            coming = ahead.submit(stage.batches, progress.step + 1)
            for optimizer in optimizers:
                share = 1.0 if isinstance(optimizer, torch.optim.Muon) else stage.pace.small_rate
                for group in optimizer.param_groups:
                    group["lr"] = share * stage.pace.rate(progress.step)
            loss = _step(stage, parameters, optimizers, batches, workers)
            progress.step += 1
            progress.seconds = before + time.monotonic() - started
            progress.processor = busy_before + time.process_time() - busy
            running = loss if running == 0.0 else 0.95 * running + 0.05 * loss
            if progress.step % 50 == 0:
                print(f"{stage.name}: step {progress.step} loss {running:.4f} {progress.seconds:.0f} s", flush=True)
            if progress.step % save_every == 0 or progress.step == stage.steps:
                _save(stage, optimizers, progress, checkpoint)
    return progress


def _optimizers(stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, in two parts that step side by side, and AdamW for norms and embeddings; these do not
    decay, lest the embeddings of rare tokens vanish."""
    matrices, others = [], []
    for name, parameter in stage.model.named_parameters():
        if parameter.requires_grad:
            (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
    muons = [
        torch.optim.Muon(part, weight_decay=stage.pace.weight_decay, adjust_lr_fn="match_rms_adamw")
        for part in (matrices[::2], matrices[1::2])
    ]
    return [*muons, torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98), fused=True)]


def _step(
    stage: Stage,
    parameters: list[nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
    batches: Sequence[Any],
    workers: Executor,
) -> float:
    """One update from all the batches together; returns their mean loss."""
    total = sum(stage.weight(batch) for batch in batches)

    def gradients(batch: Any) -> tuple[float, tuple[torch.Tensor, ...]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=_FAST_BF16):
            loss = stage.loss(batch) / total
        return loss.item(), torch.autograd.grad(loss, parameters, allow_unused=True)

    results = list(workers.map(gradients, batches))
    for parameter, *parts in zip(parameters, *(g for _, g in results), strict=True):
        known = [part for part in parts if part is not None]
        parameter.grad = sum(known[1:], start=known[0]) if known else None
    nn.utils.clip_grad_norm_(parameters, 1.0)
    list(workers.map(lambda optimizer: optimizer.step(), optimizers))
    return sum(loss for loss, _ in results)


def _resume(stage: Stage, optimizers: list[torch.optim.Optimizer], path: Path) -> Progress:
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    if state["recipe"] != stage.recipe:
        print(f"the checkpoint {path.name} is of another recipe: starting anew")
        return Progress()
    stage.model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def _save(stage: Stage, optimizers: list[torch.optim.Optimizer], progress: Progress, path: Path) -> None:
    """Replace the checkpoint in one move, so that a stop half-way leaves the last one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "recipe": stage.recipe,
        "model": stage.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": vars(progress),
    }
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(path)
