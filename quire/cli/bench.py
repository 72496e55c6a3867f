"""`quire bench`: output tokens per second, next to transformers' generate on the same requests.

Both engines live in one process and take turns: what else the machine does hits both. Medians are compared.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Protocol

import torch

from quire.cli.terminal import console, ended_by_ctrl_c, note
from quire.errors import QuireError
from quire.platform.engine.llm import LLM
from quire.platform.outputs.outputs import RequestOutput
from quire.platform.sampling.params import SamplingParams

VOCABULARY = 15000  # prompt tokens are drawn below this, or below the model's vocabulary if that is smaller
SINGLE_OUTPUT = 128

Requests = list[tuple[list[int], int]]  # (prompt token ids, output tokens) each


def workload(
    requests: int = 32,
    seed: int = 0,
    prompt: tuple[int, int] = (32, 256),
    output: tuple[int, int] = (32, 128),
    vocab: int = VOCABULARY,
    marker: int | None = None,
) -> Requests:
    """Requests of random token ids, each with its own output length; the same for the same arguments.

    prompt, output: least and most tokens. vocab: token ids are drawn from 10 to vocab - 1. marker: an id that stands
    for an image, so that no prompt of text may have it; the one below takes its place.
    """
    draw = random.Random(seed)
    drawn = []
    for _ in range(requests):
        length = draw.randint(*prompt)
        token_ids = [draw.randrange(10, vocab) for _ in range(length)]
        token_ids = [token - (token == marker) for token in token_ids]
        drawn.append((token_ids, draw.randint(*output)))
    return drawn


def workload_for(llm: LLM, requests: int = 32, seed: int = 0, **lengths: tuple[int, int]) -> Requests:
    """`workload` of token ids that this model takes in a prompt of text."""
    engine = llm.llm_engine
    sight = engine.input_processor.image_spec
    vocab = min(VOCABULARY, engine.limits.vocab_size)
    return workload(requests, seed, vocab=vocab, marker=sight.marker_id if sight else None, **lengths)


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
        used = sum(sequence.num_computed for sequence in running)
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
    weight = next(engine.runner.model.parameters())
    report = Report(
        model=model or "the bundled model",
        dtype=str(weight.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        block_size=engine.pool.block_size,
        pool_blocks=engine.pool.num_blocks,
        pool_bytes=sum(c.keys.nbytes + c.values.nbytes for c in engine.runner.caches),
    )
    engines: list[Engine] = [Quire(llm)]
    if with_transformers:
        engines.append(Transformers(str(engine.path), weight.dtype, weight.device))
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


def show(report: Report, as_json: bool) -> None:
    """Print a report."""
    if as_json:
        lines = [
            {**asdict(line), "out_tok_s": line.rate, "ratio_to_transformers": report.ratio(line)}
            for line in report.lines
        ]
        print(json.dumps({**asdict(report), "lines": lines}, indent=2))
        return
    from rich.table import Table

    table = Table("engine", "case", "out tok/s", "range", "ratio", "waste", "preempted")
    for line in report.lines:
        ratio, waste = report.ratio(line), line.turns[0].waste
        rates = [turn.rate for turn in line.turns]
        table.add_row(
            line.engine,
            line.case,
            f"{line.rate:.1f}",
            f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else "",
            "" if ratio is None else f"{ratio:.2f}",
            "" if waste is None else f"{100 * waste:.1f} %",
            "" if waste is None else str(sum(turn.preemptions or 0 for turn in line.turns)),
        )
    out = console()
    out.print(table)
    out.print(
        f"{report.model}, {report.dtype}, {report.threads} threads; KV pool: {report.pool_blocks} blocks of "
        f"{report.block_size} tokens, {report.pool_bytes / 1e6:.0f} MB; "
        f"medians of {len(report.lines[0].turns)} turns. "
        "ratio: to transformers; waste: mean share of allocated KV slots without a token.",
        markup=False,
    )
