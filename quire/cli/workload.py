"""The requests that `quire bench` and the benchmarks measure with."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.platform.engine.llm import LLM

VOCABULARY = 15000  # prompt tokens are drawn below this, or below the model's vocabulary if that is smaller
SINGLE_OUTPUT = 128

Requests = list[tuple[list[int], int]]  # (prompt token ids, output tokens) each


def workload(
    requests: int = 32,
    seed: int = 0,
    prompt: tuple[int, int] = (32, 256),
    output: tuple[int, int] = (32, 128),
    vocab: int = VOCABULARY,
    markers: Collection[int] = (),
) -> Requests:
    """Requests of random token ids, each with its own output length; the same for the same arguments.

    prompt, output: least and most tokens. vocab: token ids are drawn from 10 to vocab - 1. markers: ids that stand for
    images, videos and sounds, so that no prompt of text may have them; the next one below takes their place.
    """
    draw = random.Random(seed)
    drawn = []
    for _ in range(requests):
        length = draw.randint(*prompt)
        token_ids = [draw.randrange(10, vocab) for _ in range(length)]
        for place, token in enumerate(token_ids):
            while token in markers:
                token -= 1
            token_ids[place] = token
        drawn.append((token_ids, draw.randint(*output)))
    return drawn


def workload_for(llm: LLM, requests: int = 32, seed: int = 0, **lengths: tuple[int, int]) -> Requests:
    """`workload` of token ids that this model takes in a prompt of text."""
    engine = llm.llm_engine
    spec = engine.input_processor.image_spec
    markers = {*spec.markers.values(), *spec.placeholders} if spec else ()
    return workload(requests, seed, vocab=min(VOCABULARY, engine.limits.vocab_size), markers=markers, **lengths)


@dataclass(frozen=True)
class Plan:
    """Which requests to measure; they are drawn once the model's vocabulary is known."""

    names: Sequence[str]
    requests: int
    seed: int

    def draw(self, llm: LLM) -> dict[str, Requests]:
        drawn = {
            "single": [(workload_for(llm, 1, self.seed)[0][0], SINGLE_OUTPUT)],
            "batch": workload_for(llm, self.requests, self.seed),
        }
        return {name: drawn[name] for name in self.names}


def cases(case: str, requests: int, seed: int) -> Plan:
    """case: "single" (the batch's first prompt, with 128 output tokens), "batch" or "all"."""
    return Plan(("single", "batch") if case == "all" else (case,), requests, seed)
