"""Replicas and a ledger in one event loop, and what passes between them, which may be lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from quire.distributed.changes import ReplicaAdapters
from quire.distributed.ledger import AdapterLedger
from quire.distributed.participant import Participant
from quire.distributed.steps import Answer, Entry
from quire.server.responses.errors import ApiError


class Served:
    """What a replica serves: of each name the path that it was loaded from. bad: paths that it cannot read."""

    def __init__(self, bad: frozenset[str] = frozenset()) -> None:
        self.names: dict[str, str] = {}
        self.gate: Callable[[frozenset[str]], Awaitable[None]] | None = None
        self._bad = bad

    def has(self, name: str) -> bool:
        return name in self.names

    def is_mixture(self, name: str) -> bool:
        return False

    def check_unload(self, body: Any) -> None:
        if body.lora_name not in self.names:
            raise ApiError(404, "there is none.")

    async def stage(self, body: Any) -> Any:
        await asyncio.sleep(random.random() * 0.01)
        if body.lora_path in self._bad:
            raise ApiError(422, f"{body.lora_path}: cannot be read.")
        if body.lora_name in self.names and not body.load_inplace:
            raise ApiError(400, f"{body.lora_name} is loaded already.")
        return body

    def publish(self, staged: Any) -> dict[str, Any]:
        self.names[staged.lora_name] = staged.lora_path
        return {"name": staged.lora_name}

    async def unload(self, body: Any) -> dict[str, Any]:
        if body.lora_name not in self.names:
            raise ApiError(404, "there is none.")
        del self.names[body.lora_name]
        return {"name": body.lora_name}


class Handle:
    """What Ray makes of an actor: its methods, which fail while it is away."""

    def __init__(self) -> None:
        self.target: Any = None

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            async def remote(self, *args: Any) -> Any:
                await asyncio.sleep(random.random() * 0.002)
                if handle.target is None:
                    raise ConnectionError("the actor is dead")
                answer = await getattr(handle.target, name)(*json.loads(json.dumps(args)))
                await asyncio.sleep(random.random() * 0.002)
                return answer

        return Method()


@dataclass
class Replica:
    """One that runs. lost: the share of steps that do not reach it, and of answers that do not come back."""

    served: Served
    adapters: ReplicaAdapters
    part: Participant
    lost: float = 0.0


class World:
    """Replicas, a ledger, and what passes between them."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.replicas: dict[str, Replica] = {}
        self.begin_ledger()

    def begin_ledger(self) -> None:
        self.handle.target = AdapterLedger(self.send)

    async def begin(self, name: str, bad: frozenset[str] = frozenset()) -> Replica:
        served = Served(bad)
        adapters = ReplicaAdapters(served)  # type: ignore[arg-type]
        part = Participant(name, f"at {name}", adapters, self.handle)
        await part.start()
        self.replicas[name] = Replica(served, adapters, part)
        return self.replicas[name]

    def crash(self, name: str) -> None:
        """It ends without a word."""
        part = self.replicas.pop(name).part
        assert part._life is not None  # nobody else ends it without its leaving
        part._life.cancel()

    async def send(self, replica: str, address: str, step: str, told: dict[str, Any]) -> Answer:
        await asyncio.sleep(random.random() * 0.005)
        here = self.replicas.get(replica)
        lost = Answer(503, {"error": "no answer"}, came=False)
        if here is None or random.random() < here.lost:
            return lost
        name, entry = told["name"], Entry(told["version"], told["body"])
        try:
            if step == "publish":
                answer = Answer(200, await here.adapters.publish(name, entry))
            else:
                done = getattr(here.adapters, step)(name, entry)
                if step == "stage":
                    await done
                answer = Answer(200, {})
        except ApiError as error:
            answer = Answer(error.status, error.body)
        return lost if random.random() < here.lost else answer

    async def ask(self, name: str, replica: Replica) -> str | None:
        """A request that names an adapter: what it stands for. Raises ApiError."""
        assert replica.served.gate is not None
        await replica.served.gate(frozenset({name}))
        return replica.served.names.get(name)


def body(name: str, path: str, again: bool = False) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": path, "load_inplace": again}


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        world = World()
        try:
            await test(world)
        finally:
            for name in list(world.replicas):
                world.crash(name)

    asyncio.run(asyncio.wait_for(whole(), 120))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)
