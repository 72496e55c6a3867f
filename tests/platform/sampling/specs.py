"""Tokens to draw, said in one line: what the engine's rooms put together from a request and its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire import SamplingParams
from quire.platform.sampling import sampler
from quire.platform.sampling.logits_processors.base import ProcessorRequest
from quire.platform.sampling.logits_processors.chain import Chain, build_chain
from quire.platform.sampling.results import Failure, Sampled
from quire.platform.sampling.sampling_input import SamplingInput, SamplingState


@dataclass(frozen=True)
class Spec:
    """One token to draw from a row, for a request with these parameters that has generated `output`."""

    row: int
    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    seed: int = 0
    stop: Sequence[int] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def chain(self, size: int) -> Chain:
        return build_chain(ProcessorRequest(self.params, self.prompt, size, None, frozenset(self.stop), self.bad_words))

    def state(self, size: int) -> SamplingState:
        return SamplingState(SamplingInput(self.params, self.chain(size)), self.output)


def draws(specs: Sequence[Spec], size: int) -> list[sampler.TokenDraw]:
    """Specs that differ in their seeds alone are of one sequence."""
    states: dict[tuple[int, ...], SamplingState] = {}
    made = []
    for spec in specs:
        key = (id(spec.params), id(spec.prompt), id(spec.output), id(spec.stop), id(spec.bad_words))
        if key not in states:
            states[key] = spec.state(size)
        made.append(sampler.TokenDraw(spec.row, states[key], spec.seed))
    return made


def sample(logits: torch.Tensor, specs: Sequence[Spec]) -> list[Sampled]:
    return sampler.sample(logits, draws(specs, logits.shape[1]))


def processed(row: np.ndarray, state: SamplingState) -> np.ndarray:
    """A row as the state's processors change it."""
    if state.is_plain:
        return row
    changed = state.changed(row)
    assert not isinstance(changed, Failure)
    return changed
