"""Adapters loaded and unloaded by many threads, and random lives of many adapters at once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLMEngine, LoRARequest
from quire.errors import AdapterError, RequestError
from tests.lora.adapter_files import (
    drive,
    greedy,
    no_adapters,
    nothing_left,
    open_llm,
    prompt,
    result,
    tokens,
)
from tests.lora.adapter_life import NAMES, PROMPT, Solo, load

SEEDS = 12  # of random lives


@pytest.fixture(scope="module")
def mixed(path: Path, folders: dict[str, Path]) -> Solo:
    """(names and weights of the eight, prompt, number of tokens) -> the tokens of a request that is alone."""
    llm = open_llm(path, enable_prefix_caching=False)
    for name in NAMES:
        llm.load_lora_adapter(name, str(folders[name]))
        llm.load_lora_adapter(f"{name}'", str(folders[name]))  # for mixtures of an adapter with itself

    @cache
    def answer(parts: tuple[tuple[str, float], ...], ids: tuple[int, ...]) -> list[int]:
        twice = len(parts) == 2 and parts[0][0] == parts[1][0]
        named = [(f"{name}'" if twice and place else name, weight) for place, (name, weight) in enumerate(parts)]
        one = LoRARequest("mix", adapters=named) if named else None
        return tokens(llm, [list(ids)], [one], greedy(9))[0]

    return lambda parts, ids, count: answer(parts, ids)[:count]


# -- many threads ----------------------------------------------------------------------------------------------------


def test_fifty_loads_from_fifty_threads_while_generating(path, folders, solo):
    llm = open_llm(path)
    load(llm, folders, ["a0"])
    errors: list[BaseException] = []
    taken: list[str] = []

    def add(number: int) -> None:
        try:
            llm.load_lora_adapter(f"t{number}", str(folders[NAMES[number % 8]]), lora_int_id=number + 1)
            llm.load_lora_adapter("same", str(folders["a3"]))
            taken.append(f"t{number}")
        except AdapterError as error:
            if "'same' is loaded already" not in str(error):
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    expected = solo(folders["a0"], count=20), solo(None, count=20)
    while any(thread.is_alive() for thread in threads):
        assert tokens(llm, [PROMPT] * 2, ["a0", None], greedy(20)) == list(expected)
    assert not errors and len(taken) == 1, "one thread alone was to get the name that all wanted"
    assert len(llm.list_lora_adapters()) == 52
    names = [f"t{number}" for number in range(50)]
    assert tokens(llm, [PROMPT] * 50, names) == [solo(folders[NAMES[number % 8]]) for number in range(50)]
    nothing_left(llm)


@pytest.mark.parametrize("tight", [False, True])
def test_churn(path, folders, solo, size, tmp_path, tight):
    """Others load, unload, reload and pin every few ms: each of many mixed requests gets its own adapter's tokens."""
    limits = {"lora_device_bytes": 3 * size, "lora_host_bytes": 5 * size} if tight else {}
    llm = open_llm(path, block_size=4, max_num_batched_tokens=32, max_num_seqs=6, num_gpu_blocks_override=60, **limits)
    load(llm, folders, NAMES[:6])
    stop, errors, rounds = threading.Event(), [], [0]

    def churn() -> None:
        rng = random.Random(1)
        try:
            while not stop.is_set():
                llm.llm_engine.load_lora_adapter("y", str(folders["a7"]))
                name = rng.choice(NAMES[:6])
                llm.llm_engine.load_lora_adapter(name, str(folders[name]), load_inplace=True)
                llm.list_lora_adapters()
                llm.pin_lora_adapter("y")
                time.sleep(0.002)
                llm.llm_engine.unload_lora_adapter("y")
                rounds[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for attempt in range(100):
            if attempt >= 4 and (errors or rounds[0] > 3):  # on a busy machine the other thread seldom has its turn
                break
            rng = random.Random(attempt)
            wanted = [rng.choice([None, *NAMES[:6]]) for _ in range(24)]
            given = [prompt(rng.randrange(3), 14) for _ in wanted]
            got = tokens(llm, given, wanted, greedy(7))
            assert got == [solo(folders[name] if name else None, ids, 7)
                           for name, ids in zip(wanted, given, strict=True)]  # fmt: skip
    finally:
        stop.set()
        thread.join(20)
    assert not errors and rounds[0] > 3
    nothing_left(llm)
    for info in llm.list_lora_adapters():
        assert llm.unload_lora_adapter(info.name) in (0, size)
    no_adapters(llm)


class Life:
    """Random turns of an engine's life with adapters, and what must come of them."""

    def __init__(self, rng: random.Random, engine: LLMEngine, folders: dict[str, Path], mixed: Solo):
        self.rng = rng
        self.engine = engine
        self.folders = folders
        self.mixed = mixed
        self.current: dict[str, str] = {}  # name -> whose folder it stands for
        self.expected: dict[str, list[int]] = {}
        self.outputs: dict[str, Any] = {}
        self.unloadings: list[int] = []
        self._numbers = itertools.count()

    def turn(self) -> None:
        turns = (self.load, self.unload, self.pin, self.add, self.abort, self.step)
        self.rng.choices(turns, (5, 2, 2, 12, 2, 8))[0]()
        if not set(self.expected) <= set(self.engine.core.requests) | set(self.outputs):
            raise AssertionError("a request is lost")

    def load(self) -> None:
        rng = self.rng
        name, folder = rng.choice("uvwxyz"), rng.choice(NAMES)
        try:
            self.engine.load_lora_adapter(name, str(self.folders[folder]), rng.random() < 0.7, rng.random() < 0.1)
            self.current[name] = folder
        except AdapterError as error:
            assert "is loaded already" in str(error) or "pin less" in str(error), error

    def unload(self) -> None:
        if self.current:
            name = self.rng.choice(sorted(self.current))
            self.unloadings.append(self.engine.unload_lora_adapter(name))
            del self.current[name]

    def pin(self) -> None:
        if self.current:
            try:
                self.engine.pin_lora_adapter(self.rng.choice(sorted(self.current)), self.rng.random() < 0.5)
            except AdapterError as error:
                assert "pin less" in str(error)

    def add(self) -> None:
        rng, current = self.rng, self.current
        number, request = str(next(self._numbers)), None
        ids, count = prompt(rng.randrange(3), 14), rng.randint(1, 9)
        parts: list[tuple[str, float]] = []
        if current and rng.random() < 0.8:
            name = rng.choice(sorted(current))
            parts, request = [(current[name], 1.0)], LoRARequest(name)
            if len(current) > 1 and rng.random() < 0.3:
                pair = rng.sample(sorted(current), 2)
                request = LoRARequest("mix", adapters=[(pair[0], 0.5), (pair[1], -1.0)])
                parts = [(current[pair[0]], 0.5), (current[pair[1]], -1.0)]
        try:
            self.engine.add_request(number, ids, greedy(count), request)
        except RequestError as error:
            assert "the mixture takes" in str(error), error
        else:
            self.expected[number] = self.mixed(tuple(parts), tuple(ids), count)

    def abort(self) -> None:
        if self.engine.core.requests:
            number = self.rng.choice(sorted(self.engine.core.requests))
            self.engine.abort_request(number)
            del self.expected[number]
            self.outputs.pop(number, None)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.outputs.update((output.request_id, output) for output in self.engine.step())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_life(path, folders, size, mixed, seed):
    """Random loads, reloads, unloads, pins, requests, aborts and limits: right tokens, and nothing hangs."""
    rng = random.Random(seed)
    limits: dict[str, Any] = {
        "lora_device_bytes": rng.choice([None, 1, 2, 3]),
        "lora_host_bytes": rng.choice([None, 1, 2, 3, 4]),
        "max_loras": rng.choice([None, None, 1, 2]),
        "max_cpu_loras": rng.choice([None, None, 1, 2, 3]),
    }
    for name in [name for name in limits if limits[name] is None]:
        del limits[name]
    for name in [name for name in limits if "bytes" in name]:
        limits[name] = limits[name] * size + size // 2
    llm = open_llm(path, block_size=4, num_gpu_blocks_override=30, max_num_seqs=rng.choice([1, 2, 4]),
                   max_num_batched_tokens=rng.choice([7, 30]), **limits)  # fmt: skip
    engine = llm.llm_engine
    life = Life(rng, engine, folders, mixed)
    for _ in range(90):
        life.turn()
    life.outputs.update(drive(engine))
    assert {number: result(life.outputs[number]) for number in life.expected} == life.expected
    nothing_left(llm)
    assert all(engine.freed_bytes(unloading) in (0, size) for unloading in life.unloadings)
    for name in life.current:
        llm.unload_lora_adapter(name)
    no_adapters(llm)
