"""quire and transformers' generate at the same requests, for `quire bench`.

Both engines live in one process and take turns: what else the machine does hits both. Medians are compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Protocol

import torch

from quire.cli.terminal import ended_by_ctrl_c, note
from quire.cli.workload import Plan, Requests
from quire.errors import QuireError
from quire.platform.engine.llm import LLM
from quire.platform.kv.windows import used_slots
from quire.platform.outputs.outputs import RequestOutput
from quire.platform.sampling.params import SamplingParams


@dataclass(frozen=True)
class Turn:
    """One run of one case. waste: mean share of the allocated KV slots that held no token, over the steps."""

    out_tokens: int
    seconds: float
    waste: float | None = None
    preemptions: int | None = None

    @property
    def rate(self) -> float:
        return self.out_tokens / self.seconds


@dataclass
class Line:
    """One engine's turns at one case."""

    engine: str
    case: str
    turns: list[Turn] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(turn.rate for turn in self.turns)


@dataclass
class Report:
    """All that was measured, and on what."""

    model: str
    dtype: str
    threads: int
    block_size: int
    pool_blocks: int
    pool_bytes: int
    lines: list[Line] = field(default_factory=list)

    def ratio(self, line: Line) -> float | None:
        """This line's rate over that of transformers at the same case."""
        for other in self.lines:
            if other.engine == "transformers" and other.case == line.case:
                return line.rate / other.rate
        return None


class Engine(Protocol):
    """What can take a turn."""

    name: str

    def run(self, requests: Requests, turn: str) -> Turn: ...


class Quire:
    """quire with its prefix cache on; a salt for each turn keeps it from profiting from the turns before."""

    name = "quire"

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine

    def run(self, requests: Requests, turn: str) -> Turn:
        engine = self.engine
        wastes: list[float] = []
        ended: dict[str, RequestOutput] = {}
        preemptions = engine.scheduler.num_preemptions
        begin = time.perf_counter()
        for index, (token_ids, wanted) in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
            engine.add_request(f"{turn}-{index}", {"prompt_token_ids": token_ids, "cache_salt": turn}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if isinstance(output, RequestOutput):
                    ended[output.request_id] = output
            wastes += self._waste()
        seconds = time.perf_counter() - begin
        made = sum(len(output.outputs[0].token_ids) for output in ended.values())
        asked = sum(wanted for _, wanted in requests)
        if made != asked:
            raise QuireError(f"{made} tokens were generated, not the {asked} that were asked for.")
        return Turn(made, seconds, mean(wastes or [0.0]), engine.scheduler.num_preemptions - preemptions)

    def _waste(self) -> list[float]:
        running, kv = self.engine.scheduler.running, self.engine.scheduler.kv
        allocated = kv.pool.block_size * sum(len(kv.blocks(sequence.id)) for sequence in running)
        used = sum(used_slots(kv.windows, sequence.num_computed, kv.pool.block_size) for sequence in running)
        return [(allocated - used) / allocated] if allocated else []


class Transformers:
    """transformers' generate on one left-padded batch, run until the longest output is done.

    Only the tokens that were asked for count: what its shorter requests get beyond them is of no use.
    """

    name = "transformers"

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()
        # AutoModelForCausalLM knows no model with a vision tower, and the other one no model without.
        sees = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.model = kind.from_pretrained(path, dtype=dtype).eval().to(device)
        self.model.generation_config.pad_token_id = 0

    def run(self, requests: Requests, turn: str) -> Turn:
        begin = time.perf_counter()
        longest = max(len(token_ids) for token_ids, _ in requests)
        steps = max(wanted for _, wanted in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (token_ids, _) in enumerate(requests):
            ids[row, longest - len(token_ids) :] = torch.tensor(token_ids)
            mask[row, longest - len(token_ids) :] = 1
        self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
        return Turn(sum(wanted for _, wanted in requests), time.perf_counter() - begin)


def measure(
    model: str | None,
    plan: Plan,
    rounds: int,
    dtype: str | None = None,
    block_size: int | None = None,
    with_transformers: bool = True,
) -> Report:
    """Load the engines and let them take turns. model None: the bundled one. Raises QuireError."""
    with ended_by_ctrl_c():
        llm = LLM(model, dtype=dtype, block_size=block_size, skip_tokenizer_init=True)
    engine = llm.llm_engine
    facts = engine.executor.facts
    report = Report(
        model=model or "the bundled model",
        dtype=str(facts.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        block_size=engine.pool.block_size,
        pool_blocks=engine.pool.num_blocks,
        pool_bytes=facts.pool_bytes,
    )
    engines: list[Engine] = [Quire(llm)]
    if with_transformers:
        engines.append(Transformers(str(engine.path), facts.dtype, torch.device(facts.device)))
    drawn = plan.draw(llm)
    for contender in engines:  # page in the weights, start the threads
        contender.run([(token_ids[:32], 4) for token_ids, _ in drawn[plan.names[0]]], "warm-up")
    for name, requests in drawn.items():
        lines = [Line(contender.name, name) for contender in engines]
        for turn in range(rounds):
            for contender, line in zip(engines, lines, strict=True):
                note(f"{name}, turn {turn + 1} of {rounds}: {contender.name} ...")
                line.turns.append(contender.run(requests, f"{name}-{turn}"))
        report.lines += lines
    return report
