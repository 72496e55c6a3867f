"""Training by the clock: as many steps as there is time for, on a processor or a GPU, with checkpoints.

Unlike ``stage.py``'s, a run is not repeated bit for bit: how often examples are seen again depends on how fast they
are made.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mixture import TASKS, Batch, Supply
from torch import nn
from torch.nn.functional import cross_entropy

_KEPT = 400  # steps' batches that are seen again while no new ones are there
_AGAIN = 4  # times at most that a step waits for nothing new, for each that is new
_REPORT = 50  # steps


@dataclass(frozen=True)
class Pace:
    """How long, and how fast. rate: of the matrices; small_rate: of all else, as a share of it."""

    minutes: float
    rate: float
    small_rate: float = 0.5
    warmup: float = 0.04  # the share of the time
    weight_decay: float = 0.05

    def at(self, done: float) -> float:
        """When so much of the time is over: a linear warm-up, then a cosine down to nothing."""
        if done < self.warmup:
            return self.rate * max(done, 0.002) / self.warmup
        return self.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - self.warmup) / (1 - self.warmup))))


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) for matrices; those of one shape step together, as the many
    small products would take a GPU longer to be told than to do. The rate is as AdamW's."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        shapes = sorted({tuple(one.shape) for one in matrices})
        groups = [{"params": [one for one in matrices if tuple(one.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            matrices = [one for one in group["params"] if one.grad is not None]
            if not matrices:
                continue
            for one in matrices:
                if "momentum" not in self.state[one]:
                    self.state[one]["momentum"] = torch.zeros_like(one)
            gradients, sums = [one.grad for one in matrices], [self.state[one]["momentum"] for one in matrices]
            torch._foreach_lerp_(sums, gradients, 1 - group["momentum"])
            updates = orthogonal(torch.stack(torch._foreach_lerp(gradients, sums, group["momentum"])))
            rate = group["lr"] * 0.2 * math.sqrt(max(matrices[0].shape))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(updates.to(matrices[0].dtype).unbind()), alpha=-rate)


def orthogonal(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[N, a, b] -> the same, each with singular values near 1, by a Newton-Schulz iteration."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x.bfloat16() if stack.is_cuda else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def optimizers(model: nn.Module, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
    found: list[torch.optim.Optimizer] = [Muon(matrices, weight_decay=weight_decay)]
    if others:
        found.append(torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98), fused=True))
    return found


def losses_of(model: Any, batch: Batch, media: list[int]) -> torch.Tensor:
    """The weighted losses of a LLaVA, one for each of ``counted``. media: the tokens in whose place features stand."""
    import joint

    ids, weights = batch.ids.long(), batch.weights.float()
    inputs = model.model.language_model.embed_tokens(ids)
    if len(batch.images):
        values = batch.images.permute(0, 3, 1, 2).float() / 127.5 - 1
        features = joint.see(model, values).to(inputs.dtype)
        places = (ids[..., None] == torch.tensor(media, device=ids.device)).any(-1)
        inputs = inputs.masked_scatter(places.unsqueeze(-1), features)
    hidden = model.model.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    # Places found beforehand: to find them here would have the GPU waited for.
    counted = batch.counted.long()
    logits = model.lm_head(hidden.flatten(0, 1)[counted]).float()
    losses = cross_entropy(logits, ids.flatten()[counted + 1], reduction="none")
    return losses * weights.flatten()[counted + 1]


def run(
    name: str,
    model: nn.Module,
    pace: Pace,
    supply: Supply,
    losses: Callable[[Batch], torch.Tensor],
    device: torch.device,
    checkpoint: Path | None = None,
    save: Callable[[], None] | None = None,
    save_every: float = 60.0,
) -> int:
    """Train until the time is over, from the checkpoint, if there is one; returns how many steps there were.

    losses: of a batch, one for each of ``counted``.
    save: called now and then, and checkpoint written, so that what is stopped half-way is not lost.
    """
    moved = optimizers(model, pace.weight_decay)
    parameters = [one for one in model.parameters() if one.requires_grad]
    step, before = _resume(model, moved, checkpoint, device)
    kept: list[list[Batch]] = []
    chooser, again = random.Random(name), 0
    kept.append(supply.take(wait=True) or [])
    started = saved = time.monotonic()
    told, fresh = torch.zeros(2, len(TASKS), device=device), 1
    print(f"{name}: {sum(one.numel() for one in parameters):,} parameters, from step {step}", flush=True)
    while (seconds := before + time.monotonic() - started) < pace.minutes * 60:
        found = supply.take(wait=again >= _AGAIN)
        batches, again, fresh = _chosen(found, kept, chooser, again, fresh)
        for optimizer in moved:
            share = 1.0 if isinstance(optimizer, Muon) else pace.small_rate
            for group in optimizer.param_groups:
                group["lr"] = share * pace.at(seconds / (pace.minutes * 60))
        weight = sum(one.weights[:, 1:].float().sum() for one in batches)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=_has_bf16(device)):
                parts = losses(batch)
            (parts.sum() / weight).backward()
            told[0].index_add_(0, batch.tasks.int(), parts.detach())
            told[1].index_add_(0, batch.tasks.int(), batch.weights.flatten()[batch.counted.long() + 1].float())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in moved:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % _REPORT == 0:
            print(f"{name}: step {step} {_told(told)} {seconds:.0f} s, {fresh} new", flush=True)
            told.zero_()
        if time.monotonic() - saved > save_every:
            _keep(model, moved, checkpoint, step, before + time.monotonic() - started, save)
            saved = time.monotonic()
    _keep(model, moved, checkpoint, step, pace.minutes * 60, save)
    print(f"{name}: {step} steps, {fresh} of them new, {time.monotonic() - started:.0f} s", flush=True)
    return step


def _has_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are fast there."""
    return device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()


def _told(sums: torch.Tensor) -> str:
    """The losses, each task's by itself."""
    losses, weights = sums.tolist()
    shown = (f"{task} {a / b:.4f}" for task, a, b in zip(TASKS, losses, weights, strict=True) if b)
    return f"loss {sum(losses) / sum(weights):.4f} ({', '.join(shown)})"


def _chosen(
    found: list[Batch] | None, kept: list[list[Batch]], chooser: random.Random, again: int, fresh: int
) -> tuple[list[Batch], int, int]:
    """What is new, or what has been; how often that was in turn, and how many were new."""
    if found is None:
        return chooser.choice(kept), again + 1, fresh
    if len(kept) < _KEPT:
        kept.append(found)
    else:
        kept[chooser.randrange(_KEPT)] = found
    return found, 0, fresh + 1


def _resume(
    model: nn.Module, moved: list[torch.optim.Optimizer], path: Path | None, device: torch.device
) -> tuple[int, float]:
    if path is None or not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True, map_location=device)
    model.load_state_dict(state["model"])
    for optimizer, one in zip(moved, state["optimizers"], strict=True):
        optimizer.load_state_dict(one)
    return state["step"], state["seconds"]


def _keep(
    model: nn.Module,
    moved: list[torch.optim.Optimizer],
    path: Path | None,
    step: int,
    seconds: float,
    save: Callable[[], None] | None,
) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in moved]}
        fresh = path.with_suffix(".new")
        torch.save({**state, "step": step, "seconds": seconds}, fresh)
        fresh.replace(path)
    if save is not None:
        save()
