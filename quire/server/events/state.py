"""The engine's state as /v1/engine/events tells it: numbers, the model's name and those of adapters, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quire import __version__
from quire.lora import AdapterInfo
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.watching.block_map import BlockMap, block_maps
from quire.platform.engine.watching.snapshot import EngineSnapshot
from quire.platform.engine.watching.steps import StepRecord
from quire.platform.kv.group_tables import NO_BLOCK
from quire.server.events.rates import Rates

MOST_ADAPTERS = 256  # that are told one by one

_NOTHING: set[int] = set()
_NO_BLOCK = {NO_BLOCK}


class StateEvent:
    """An event in the making: watchers get the same bytes but for the steps that they have seen. last: the newest one's
    number."""

    def __init__(self, state: dict[str, Any], steps: Mapping[int, bytes]) -> None:
        """steps: by their numbers, in order."""
        self.last = max(steps, default=0)
        self._head = b"event: state\ndata: " + _json(state)[:-1] + b',"steps":['
        self._steps = list(steps.items())
        self._made: dict[int, bytes] = {}

    def after(self, number: int) -> bytes:
        """The event for who has seen the steps up to this one."""
        made = self._made.get(number)
        if made is None:
            told = b",".join(step for place, step in self._steps if place > number)
            made = self._made[number] = b"%b%b]}\n\n" % (self._head, told)
        return made


def engine_facts(engine: LLMEngine, name: str) -> dict[str, Any]:
    """What does not change while the engine runs. name: what clients call the model."""
    facts, scheduler = engine.executor.facts, engine.config.scheduler
    return {
        "model": name,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "device": facts.device,
        "version": __version__,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_batched_tokens": scheduler.max_num_batched_tokens,
    }


class StateWriter:
    """Makes events of snapshots, one after the other. For a thread of its own: each takes about a millisecond.

    facts: `engine_facts`. began: what times are told from, by `time.monotonic()`.
    """

    def __init__(self, facts: dict[str, Any], began: float) -> None:
        self._facts = facts
        self._began = began
        self._rates = Rates()
        self._steps: dict[int, bytes] = {}

    def write(self, snapshot: EngineSnapshot, adapters: Iterable[AdapterInfo]) -> StateEvent:
        """The event of a snapshot that is newer than those before."""
        listed = sorted(adapters, key=lambda one: (-one.requests, one.tier != "device", one.tier != "host", one.name))
        state = {
            "time": round(snapshot.time - self._began, 3),
            "sleeping": snapshot.sleeping,
            "engine": self._facts,
            "pools": _pools(snapshot),
            "requests": _requests(snapshot),
            "more_requests": snapshot.more_requests,
            "adapters": [_adapter(one) for one in listed[:MOST_ADAPTERS]],
            "more_adapters": max(0, len(listed) - MOST_ADAPTERS),
            "rates": self._rates.take(snapshot.time, snapshot.counts),
        }
        known, began = self._steps, self._began
        self._steps = {one.number: known.get(one.number) or _json(_step(one, began)) for one in snapshot.steps}
        return StateEvent(state, self._steps)


def _pools(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    kv, states = block_maps(snapshot)
    pools = [_pool("kv", snapshot.block_size, kv, snapshot.swapped, snapshot.swap_blocks)]
    if states is not None:
        pools.append(_pool("states", None, states, 0, 0))
    return pools


def _pool(name: str, size: int | None, blocks: BlockMap, swapped: int, room: int) -> dict[str, Any]:
    return {
        "name": name,
        "block_size": size,
        "total": blocks.free + blocks.cached + blocks.owned,
        "free": blocks.free,
        "cached": blocks.cached,
        "owned": blocks.owned,
        "swapped": swapped,
        "swap_total": room,
        "cell": blocks.cell,
        "map": blocks.runs,
    }


def _requests(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    held: dict[int, set[int]] = {}  # each block once, though several of a request's sequences may hold it
    for number, table in snapshot.tables:
        held.setdefault(number, set()).update(table)
    return [
        {
            "number": row.number,
            "state": row.state,
            "adapter": row.adapter,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens,
            "computed_tokens": row.computed_tokens,
            "output_tokens": row.output_tokens,
            "sequences": row.sequences,
            "blocks": len(held.get(row.number, _NOTHING) - _NO_BLOCK),
            "seconds": round(max(0.0, snapshot.time - row.arrival), 3),
        }
        for row in snapshot.requests
    ]


def _step(step: StepRecord, began: float) -> dict[str, Any]:
    return {
        "time": round(step.ended - began, 3),
        "milliseconds": round(1000 * step.seconds, 3),
        "prefill_tokens": step.prompt_tokens,
        "decode_tokens": step.answer_tokens,
        "sequences": step.sequences,
        "media": step.media,
        "adapters": step.adapters,
    }


def _adapter(info: AdapterInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "tier": info.tier,
        "bytes": info.bytes,
        "rank": max(info.ranks, default=None),
        "requests": info.requests,
        "pinned": info.pinned,
    }


def _json(value: Any) -> bytes:
    """With escapes for whatever a name may have: lines end events."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
