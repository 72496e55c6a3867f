"""The engine at one moment, between two steps, as plain data that nobody changes any more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.watching.steps import StepRecord, StepRecorder
from quire.platform.inputs.prepared import PreparedRequest
from quire.platform.scheduling.request import Request
from quire.platform.scheduling.scheduler import Scheduler

MOST_REQUESTS = 256  # that are told one by one

RequestState = Literal["running", "waiting", "swapped", "images", "adapter"]

# Owners of blocks are requests' numbers, and two numbers are no request's: see `block_map`.
FIRST_NUMBER = 2


class RequestRow(NamedTuple):
    """A request that has not ended. number: its own, of no meaning elsewhere; a larger one arrived later.

    state: "images": being prepared; "adapter": waits for its adapter; "swapped": waits, with what is computed of it in
    main memory. adapter: what it calls the adapter, or the mixture, that it runs with. cached_tokens: of its prompt,
    found in the prefix cache. computed_tokens: of its sequence that has got furthest. output_tokens: of all of them.
    arrival: by `time.monotonic()`.
    """

    number: int
    state: RequestState
    adapter: str | None
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    sequences: int
    arrival: float


class Counts(NamedTuple):
    """Counts since the engine began. prompt_tokens: of requests that began to run; ended_requests: in whatever way."""

    prompt_tokens: int
    output_tokens: int
    ended_requests: int
    prefix_queries: int
    prefix_hits: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """No prompt's text or tokens, no answer's, no client's name of a request.

    time: by `time.monotonic()`. cost: seconds of the engine's thread that this took.
    references: of each block, how many sequences hold it; states come first, as in the pool. findable: blocks that the
    prefix index knows. tables: (request's number, blocks; negative ones are none) of each sequence that runs, those of
    the oldest request first. swapped, swap_blocks: blocks of main memory that are taken, and all.
    requests: those that run, then those that wait, the oldest first; more_requests: so many are not told.
    steps: the last ones, the oldest first.
    """

    time: float
    cost: float
    sleeping: bool
    num_states: int
    num_blocks: int
    block_size: int
    num_free: int
    num_free_states: int
    swapped: int
    swap_blocks: int
    references: list[int]
    findable: list[int]
    tables: list[tuple[int, list[int]]]
    requests: list[RequestRow]
    more_requests: int
    steps: tuple[StepRecord, ...]
    counts: Counts


def take_snapshot(engine: LLMEngine, recorder: StepRecorder) -> EngineSnapshot:
    """In the engine's thread, between two steps. Lists are copied; what takes longer is for others to do."""
    begun = time.thread_time()
    scheduler = engine.scheduler
    kv, pool = scheduler.kv, scheduler.kv.pool
    requests = _rows(engine)
    tables = [(_number(one.request.arrival), kv.tables.copy_table(one.id)) for one in scheduler.running]
    return EngineSnapshot(
        time=time.monotonic(),
        sleeping=engine.is_sleeping,
        num_states=pool.num_states,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        num_free=pool.num_free,
        num_free_states=pool.num_free_states,
        swapped=kv.swap.num_blocks - kv.swap.num_free,
        swap_blocks=kv.swap.num_blocks,
        references=pool.copy_references(),
        findable=[] if pool.index is None else pool.index.blocks(),
        tables=tables,
        requests=requests,
        more_requests=engine.get_num_unfinished_requests() - len(requests),
        steps=recorder.records(),
        counts=Counts(
            scheduler.prompt_tokens,
            scheduler.generated_tokens,
            engine.core.num_ended,
            kv.prefix_queries,
            kv.prefix_hits,
        ),
        cost=time.thread_time() - begun,
    )


def _number(serial: int) -> int:
    return serial + FIRST_NUMBER


def _rows(engine: LLMEngine) -> list[RequestRow]:
    rows: dict[int, RequestRow] = {}
    for row in chain(_queued(engine.scheduler, rows), map(_arriving, engine.media.waiting.values())):
        rows[row.number] = row
        if len(rows) >= MOST_REQUESTS:
            break
    return list(rows.values())


def _queued(scheduler: Scheduler, told: dict[int, RequestRow]) -> Iterator[RequestRow]:
    """Each request once, however many sequences it has."""
    for sequence in chain(scheduler.running, scheduler.waiting):
        request = sequence.request
        if _number(request.arrival) not in told:
            yield _row(scheduler, request)


def _row(scheduler: Scheduler, request: Request) -> RequestRow:
    sequences = [one for one in request.sequences if one.finish_reason is None]
    return RequestRow(
        _number(request.arrival),
        _state(scheduler, request),
        None if request.lora is None else request.lora.lora_name,
        len(request.prompt_ids),
        request.metrics.num_cached_tokens,
        max((one.num_computed for one in sequences), default=0),
        sum(len(one.output_ids) for one in request.sequences),
        len(sequences),
        request.metrics.arrival_time,
    )


def _state(scheduler: Scheduler, request: Request) -> RequestState:
    if any(one.running for one in request.sequences):
        return "running"
    if any(scheduler.kv.swap.tokens_of(one.id) for one in request.sequences):
        return "swapped"
    return "adapter" if scheduler.adapters.lacks(request) else "waiting"


def _arriving(prepared: PreparedRequest) -> RequestRow:
    prompt = prepared.prompt
    adapter = None if prompt.lora is None else prompt.lora.lora_name
    return RequestRow(_number(prepared.serial), "images", adapter, len(prompt.ids), 0, 0, 0, 1, prepared.time)
