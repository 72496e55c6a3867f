"""More adapters than the device or main memory holds: all are served, in turns that are fair."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LoRARequest
from quire.errors import AdapterError, RequestError
from tests.lora import adapter_files as files
from tests.lora.adapter_files import ask, drive, greedy, no_adapters, nothing_left, open_llm, prompt, result, tokens
from tests.lora.adapter_life import NAMES, PROMPT, load, tiers, wait_for
from tests.multimodal.open_engine import until

Makers: tuple[Callable[..., Path], ...] = (files.plain, files.dora, files.saved, files.words, files.trained_tokens)


def test_pins_and_the_least_recently_used(path, folders, size):
    llm = open_llm(path, lora_device_bytes=2 * size, lora_host_bytes=3 * size)
    load(llm, folders, ["a0", "a1", "a2"])
    assert set(tiers(llm).values()) == {"host"}
    tokens(llm, [PROMPT], "a0")
    tokens(llm, [PROMPT], "a1")
    assert tiers(llm) == {"a0": "device", "a1": "device", "a2": "host"}
    tokens(llm, [PROMPT], "a0")  # so that a1 is the one that was used least recently
    tokens(llm, [PROMPT], "a2")
    assert tiers(llm) == {"a0": "device", "a1": "host", "a2": "device"}
    llm.pin_lora_adapter("a0")
    for name in ("a1", "a2", "a1"):
        tokens(llm, [PROMPT], name)
        assert tiers(llm)["a0"] == "device", "the pinned one went first"
    load(llm, folders, ["a3", "a4"])
    for name in ("a3", "a4", "a1", "a2", "a3"):
        tokens(llm, [PROMPT], name)
        assert tiers(llm)["a0"] == "device" and tiers(llm)[name] == "device"
    assert llm.list_lora_adapters()[0].pinned
    with pytest.raises(AdapterError, match="of pinned ones"):
        llm.pin_lora_adapter("a1")  # nobody else would find room
    llm.load_lora_adapter("a0", str(folders["a0"]), load_inplace=True)
    assert [info.pinned for info in llm.list_lora_adapters() if info.name == "a0"] == [True]
    llm.pin_lora_adapter("a0", False)
    llm.pin_lora_adapter("a1")
    for name in ("a1", "a2", "a3", "a4", "a2"):
        tokens(llm, [PROMPT], name)
    assert tiers(llm)["a0"] == "disk" and tiers(llm)["a1"] == "device"
    nothing_left(llm)


@pytest.mark.parametrize(
    "limits",
    [{"max_loras": 1}, {"max_loras": 2, "max_cpu_loras": 3}, {"max_cpu_loras": 1}, {"max_loras": 3, "max_cpu_loras": 2},
     {"device": 1}, {"host": 1}, {"device": 2, "host": 3}, {"host": 2, "max_loras": 1}],
    ids=str,
)  # fmt: skip
def test_many_more_adapters_than_fit(path, folders, solo, size, limits):
    """All finish with the right tokens, with preemption, whatever the order; the limits hold after every step."""
    limits = dict(limits)
    for short in ("device", "host"):
        if short in limits:
            limits[f"lora_{short}_bytes"] = limits.pop(short) * size + size // 2
    llm = open_llm(path, block_size=4, num_gpu_blocks_override=32, max_num_seqs=5, max_num_batched_tokens=24, **limits)
    engine = llm.llm_engine
    step, most = engine.step, [0, 0]

    def counted() -> Any:
        outputs = step()
        most[0] = max(most[0], len(engine.scheduler.adapters.device))
        most[1] = max(most[1], sum(tier != "disk" for tier in tiers(llm).values()))
        return outputs

    engine.step = counted
    load(llm, folders)
    rng = random.Random(6)
    wanted = [rng.choice([None, *NAMES, *NAMES]) for _ in range(40)]
    given = [prompt(rng.randrange(3), 18) for _ in wanted]
    for _ in range(2):
        got = tokens(llm, given, wanted, greedy(12))
        assert got == [solo(folders[name] if name else None, ids, 12) for name, ids in zip(wanted, given, strict=True)]
        nothing_left(llm)
    device = limits.get("max_loras") or limits.get("lora_device_bytes", 10**9) // size
    host = limits.get("max_cpu_loras") or limits.get("lora_host_bytes", 10**9) // size
    assert 1 <= most[0] <= min(device, host) and most[1] <= host
    if min(device, host) > 1:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("limits", [{"lora_device_bytes": 2}, {"lora_host_bytes": 2}, {"max_cpu_loras": 2},
                                    {"max_loras": 2}], ids=str)  # fmt: skip
def test_mixtures_on_little_memory(path, folders, size, limits):
    """A mixture that fits is served, among others that want its room; one that never can is refused at once."""
    limits = {name: value * size if "bytes" in name else value for name, value in limits.items()}
    ample, llm = open_llm(path), open_llm(path, **limits)
    pairs = [("a1", "a0"), ("a2", "a3"), ("a0", "a1"), ("a4", "a2"), ("a3", "a0")]
    mixtures: list[Any] = [
        LoRARequest(f"m{place}", adapters=[(a, 0.5), (b, -1.5)]) for place, (a, b) in enumerate(pairs)
    ]
    wanted = [one for place, pair in enumerate(mixtures) for one in (pair, NAMES[place], None)]
    for one in (ample, llm):
        load(one, folders)
    expected = [tokens(ample, [PROMPT], [one])[0] for one in wanted]
    assert len({tuple(one) for one in expected}) == 11
    assert tokens(llm, [PROMPT] * len(wanted), wanted) == expected
    assert tokens(llm, [PROMPT] * len(wanted), wanted[::-1]) == expected[::-1]
    with pytest.raises(RequestError, match="the mixture takes"):
        ask(llm, [PROMPT], LoRARequest("m", adapters=[("a0", 1.0), ("a1", 1.0), ("a2", 1.0)]))
    nothing_left(llm)


@pytest.mark.parametrize("limits", [{"lora_host_bytes": 3}, {"max_cpu_loras": 3}], ids=str)
def test_pins_leave_room_for_everybody(path, folders, size, limits):
    """A pin that would keep another adapter, or a mixture that waits, out for ever is refused, or the mixture is."""
    limits = {name: value * size if "bytes" in name else value for name, value in limits.items()}
    llm = open_llm(path, **limits)
    load(llm, folders, NAMES[:5])
    mixture = LoRARequest("m", adapters=[("a3", 1.0), ("a4", 1.0)])
    before = tokens(llm, [PROMPT], [mixture])
    llm.pin_lora_adapter("a0")
    assert tokens(llm, [PROMPT], [mixture]) == before
    llm.pin_lora_adapter("a1")
    with pytest.raises(AdapterError, match="pin less"):
        llm.pin_lora_adapter("a2")
    with pytest.raises(AdapterError, match="pin less"):
        llm.load_lora_adapter("a5", str(folders["a5"]), pinned=True)
    assert len(tokens(llm, [PROMPT] * 5, NAMES[:5])) == 5
    with pytest.raises(RequestError, match="the mixture takes"):
        ask(llm, [PROMPT], mixture)
    assert len(tokens(llm, [PROMPT], [LoRARequest("n", adapters=[("a0", 1.0), ("a1", 1.0), ("a4", 1.0)])])) == 1
    llm.pin_lora_adapter("a1", False)
    llm.llm_engine.add_request("x", PROMPT, greedy(), mixture)
    with pytest.raises(AdapterError, match="pin less"):
        llm.pin_lora_adapter("a2")  # the mixture holds a3 and a4, and could not have both
    assert len(result(drive(llm.llm_engine)["x"])) == 6
    llm.pin_lora_adapter("a2")
    nothing_left(llm)


@pytest.mark.parametrize("limit", ["max_loras", "lora_device_bytes", "lora_host_bytes"])
def test_nobody_starves(path, folders, solo, size, limit):
    """Under an endless stream for the adapter that is there, one that does not fit is passed by `max_num_seqs` at most.

    Requests of the base model are free to pass.
    """
    most = 3
    llm = open_llm(path, max_num_seqs=most, **{limit: 1 if limit == "max_loras" else size * 3 // 2})
    engine = llm.llm_engine
    load(llm, folders, ["a0", "a1"])
    sent, first_token, outputs = [0], {}, {}

    def stream(count: int) -> None:
        for _ in range(count):
            engine.add_request(f"s{sent[0]}", PROMPT, greedy(2 + sent[0] % 3), LoRARequest("a0"))
            sent[0] += 1

    stream(4)
    engine.step()
    engine.add_request("other", PROMPT, greedy(4), LoRARequest("a1"))
    behind = sent[0]
    for number in range(60):
        stream(3)
        if number % 4 == 0:
            engine.add_request(f"b{number}", PROMPT, greedy(2))
        for output in engine.step():
            first_token.setdefault(output.request_id, len(first_token))
            outputs[output.request_id] = output
        if "other" in outputs and outputs["other"].finished:
            break
    else:
        raise AssertionError("it starves")
    assert result(outputs["other"]) == solo(folders["a1"], count=4)
    passed = [one for one in first_token if one.startswith("s") and int(one[1:]) >= behind
              and first_token[one] < first_token["other"]]  # fmt: skip
    assert len(passed) <= most, passed
    outputs.update(drive(engine))
    assert all(result(output) == solo(folders["a0"], count=2 + int(name[1:]) % 3)
               for name, output in outputs.items() if name.startswith("s"))  # fmt: skip
    nothing_left(llm)


def test_a_pin_holds_in_main_memory_too(path, folders, solo, size):
    llm = open_llm(path, max_cpu_loras=2, lora_device_bytes=2 * size)
    load(llm, folders, ["a0"], pinned=True)
    load(llm, folders, NAMES[1:5])
    assert tiers(llm) == {"a0": "host", "a1": "disk", "a2": "disk", "a3": "disk", "a4": "host"}
    for name in ("a1", "a2", "a3"):
        assert tokens(llm, [PROMPT], name) == [solo(folders[name])]
        assert tiers(llm)["a0"] == "host"
    nothing_left(llm)


def test_prefetch(path, folders, solo, size):
    """What waits for a place on the device is read into main memory meanwhile, where there is room."""
    llm = open_llm(path, max_loras=1, max_cpu_loras=3, max_num_seqs=2)
    engine = llm.llm_engine
    load(llm, folders)
    for name in NAMES[:4]:
        engine.add_request(name, PROMPT, greedy(40), LoRARequest(name))
    assert tiers(llm)["a0"] == "disk"
    until(engine, lambda: engine.scheduler.running)
    wait_for(lambda: not any(version.fetching for version in engine.adapters._versions.values()))
    engine.step()
    wait_for(lambda: not any(version.fetching for version in engine.adapters._versions.values()))
    assert len(engine.scheduler.running) == 1
    assert [tiers(llm)[name] for name in NAMES[:4]].count("host") == 2
    outputs = drive(engine)
    assert [result(outputs[name]) for name in NAMES[:4]] == [solo(folders[name], count=40) for name in NAMES[:4]]
    nothing_left(llm)


def test_a_slow_disk_stops_nobody_else(path, folders, solo, monkeypatch):
    """While one adapter is read, the base model and the others go on; then it runs."""
    llm = open_llm(path, max_cpu_loras=2)
    engine = llm.llm_engine
    load(llm, folders, ["a0", "a1", "a2"])
    tokens(llm, [PROMPT], "a2")
    read, gate = engine.adapters._reader.read, threading.Event()

    def slow(folder: Path) -> Any:
        gate.wait(20)
        return read(folder)

    monkeypatch.setattr(engine.adapters._reader, "read", slow)
    assert tiers(llm)["a0"] == "disk"
    for name in ("a0", "a2"):
        engine.add_request(name, PROMPT, greedy(), LoRARequest(name))
    engine.add_request("base", PROMPT, greedy())
    outputs: dict[str, Any] = {}
    for _ in range(10):
        outputs.update((output.request_id, output) for output in engine.step())
    assert {name for name, output in outputs.items() if output.finished} == {"a2", "base"}
    engine.abort_request("none")
    gate.set()
    outputs.update(drive(engine))
    assert [result(outputs[name]) for name in ("a0", "a2")] == [solo(folders["a0"]), solo(folders["a2"])]
    nothing_left(llm)


@pytest.mark.parametrize("make", Makers, ids=lambda make: make.__name__)
def test_every_kind_comes_and_goes(path, tmp_path, solo, folders, make):
    """Slots are used again: what was in one before leaves nothing there."""
    mine, other = make(tmp_path / "mine", seed=3), make(tmp_path / "other", seed=4)
    llm = open_llm(path, max_loras=1)
    llm.load_lora_adapter("mine", str(mine))
    llm.load_lora_adapter("other", str(other))
    load(llm, folders, ["a1"])
    order = ["mine", "a1", "other", None, "mine", None, "other", "a1"]
    wanted = {"mine": mine, "other": other, "a1": folders["a1"], None: None}
    assert solo(mine) != solo(other)
    assert tokens(llm, [PROMPT] * len(order), order) == [solo(wanted[name]) for name in order]
    for name in order:
        assert tokens(llm, [PROMPT], [name]) == [solo(wanted[name])], name
    for name in ("mine", "other", "a1"):
        llm.unload_lora_adapter(name)
        assert tokens(llm, [PROMPT]) == [solo(None)]
    no_adapters(llm)
