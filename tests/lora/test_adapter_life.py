"""Adapters whose files go and change, that are unloaded while requests run, and requests that end early."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.errors import AdapterError, RequestError
from tests.lora import adapter_files as files
from tests.lora.adapter_files import (
    ask,
    drive,
    error_of,
    greedy,
    no_adapters,
    nothing_left,
    open_llm,
    prompt,
    result,
    tokens,
)
from tests.lora.adapter_life import NAMES, PROMPT, load, tiers, wait_for


def test_the_adapters_differ(solo, folders):
    """Else no test here could tell one's tokens from another's."""
    assert len({tuple(solo(folder)) for folder in (None, *folders.values())}) == 9


# -- files that go and change -----------------------------------------------------------------------------------------


def test_deleted_from_disk_while_loaded(path, tmp_path, solo, folders):
    """It is served from memory; by its name, and by a request that repeats its path, through a link too."""
    kept = solo(folders["a1"])
    mine = shutil.copytree(folders["a1"], tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path)
    linked = str(tmp_path / "link" / "mine")
    llm = open_llm(path)
    llm.load_lora_adapter("mine", linked)
    shutil.rmtree(mine)
    (tmp_path / "link").unlink()
    assert tokens(llm, [PROMPT], "mine") == [kept]
    assert tokens(llm, [PROMPT], [LoRARequest("mine", 1, linked)]) == [kept]
    assert tokens(llm, [PROMPT], [LoRARequest("mine", 1, str(mine))]) == [kept]
    nothing_left(llm)


@pytest.mark.parametrize("n", [1, 2])
def test_deleted_from_disk_after_eviction(path, tmp_path, solo, folders, n):
    """Its requests fail and say why; others go on; and once the files are back the very next request works."""
    mine = shutil.copytree(folders["a1"], tmp_path / "mine")
    llm = open_llm(path, max_cpu_loras=1)
    llm.load_lora_adapter("mine", str(mine))
    for _ in range(2):
        load(llm, folders, ["a2"])
        tokens(llm, [PROMPT], "a2")
        assert tiers(llm) == {"mine": "disk", "a2": "device"}
        mine.rename(tmp_path / "away")
        params = [greedy(), SamplingParams(n=n, temperature=1.0, max_tokens=6), greedy(), greedy()]
        bad_and_good = ask(llm, [PROMPT] * 4, ["mine", "mine", "a2", None], params)
        for output in bad_and_good[:2]:
            assert "adapter 'mine'" in error_of(output) and str(mine) in error_of(output)
        assert [result(output) for output in bad_and_good[2:]] == [solo(folders["a2"]), solo(None)]
        nothing_left(llm)
        (tmp_path / "away").rename(mine)
        assert tokens(llm, [PROMPT], "mine") == [solo(folders["a1"])]
        llm.unload_lora_adapter("a2")


def test_an_error_that_nobody_took_is_not_the_next_requests(path, tmp_path, solo, folders):
    mine = shutil.copytree(folders["a1"], tmp_path / "mine")
    llm = open_llm(path, max_cpu_loras=1)
    engine = llm.llm_engine
    llm.load_lora_adapter("mine", str(mine))
    load(llm, folders, ["a2"])
    mine.rename(tmp_path / "away")
    engine.add_request("x", PROMPT, greedy(), LoRARequest("mine"))
    engine.scheduler.plan()
    wait_for(lambda: not any(version.fetching for version in engine.adapters._versions.values()))
    engine.abort_request("x")
    (tmp_path / "away").rename(mine)
    assert tokens(llm, [PROMPT], "mine") == [solo(folders["a1"])]
    nothing_left(llm)


def test_changed_on_disk_after_eviction(path, tmp_path, solo, folders):
    """A name stands for what was loaded: other weights are refused until they are loaded, in place or anew."""
    mine = shutil.copytree(folders["a1"], tmp_path / "mine")
    llm = open_llm(path, max_cpu_loras=1)
    llm.load_lora_adapter("mine", str(mine))
    load(llm, folders, ["a2"])
    shutil.copytree(folders["a3"], mine, dirs_exist_ok=True)
    (output,) = ask(llm, [PROMPT], "mine")
    assert "has changed since it was loaded" in error_of(output)
    llm.load_lora_adapter("mine", str(mine), load_inplace=True)
    assert tokens(llm, [PROMPT], "mine") == [solo(folders["a3"])]
    nothing_left(llm)


def test_changed_on_disk_while_loaded(path, tmp_path, solo, folders):
    """What lies in memory is no view of the file."""
    mine = shutil.copytree(folders["a1"], tmp_path / "mine")
    llm = open_llm(path)
    llm.load_lora_adapter("mine", str(mine))
    weights = mine / "adapter_model.safetensors"
    with weights.open("r+b") as file:
        file.write(b"\xff" * weights.stat().st_size)
    assert tokens(llm, [PROMPT], "mine") == [solo(folders["a1"])]


# -- unloading and reloading while requests run ----------------------------------------------------------------------


def test_unloaded_while_running_and_waiting(path, folders, solo, size):
    llm = open_llm(path, max_num_seqs=2)
    engine = llm.llm_engine
    load(llm, folders, ["a1", "a2"])
    for number in range(4):
        engine.add_request(str(number), PROMPT, greedy(9), LoRARequest("a1"))
    outputs = {}
    for _ in range(3):
        outputs.update((output.request_id, output) for output in engine.step())
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 2
    unloading = engine.unload_lora_adapter("a1")
    with pytest.raises(RequestError, match="no adapter 'a1' is loaded"):
        engine.add_request("late", PROMPT, greedy(), LoRARequest("a1"))
    assert tiers(llm) == {"a2": "host"}
    assert engine.freed_bytes(unloading) is None
    engine.check_integrity()
    outputs.update(drive(engine))
    assert [result(outputs[str(number)]) for number in range(4)] == [solo(folders["a1"], count=9)] * 4
    engine.step()
    assert engine.freed_bytes(unloading) == size
    assert engine.adapters.host_bytes == size
    nothing_left(llm)
    assert llm.unload_lora_adapter("a2") == size
    no_adapters(llm)


def test_unloaded_from_another_thread(path, folders, solo, size):
    """The call waits for the requests that hold the adapter, and no longer."""
    llm = open_llm(path)
    load(llm, folders, ["a1"])
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(tokens(llm, [PROMPT] * 6, "a1", greedy(60))))
    thread.start()
    wait_for(lambda: len(llm.llm_engine.scheduler.running) == 6)
    freed = llm.unload_lora_adapter("a1")
    assert freed == size
    thread.join(30)
    assert done == [[solo(folders["a1"], count=60)] * 6]
    no_adapters(llm)


def test_unloading_what_nobody_steps_does_not_hang(path, folders, solo, size):
    llm = open_llm(path)
    engine = llm.llm_engine
    load(llm, folders, ["a1"])
    engine.add_request("x", PROMPT, greedy(), LoRARequest("a1"))
    with pytest.raises(RequestError, match="1 requests"):
        llm.unload_lora_adapter("a1")
    assert result(drive(engine)["x"]) == solo(folders["a1"])
    no_adapters(llm)


def test_memory_comes_back(path, tmp_path):
    """Of adapters that were loaded and used, that were refused at their last tensor, and that were replaced."""
    rank, process = 1500, psutil.Process()
    good = files.plain(tmp_path / "good", rank=rank, targets=files.ALL)
    made = files.tensors(rank, files.ALL, 1)
    made["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"][-1, -1] = torch.nan
    bad = files.write(tmp_path / "bad", files.config(rank, files.ALL), made)
    del made
    llm = open_llm(path, num_gpu_blocks_override=20)

    def round_trip() -> int:
        size = llm.load_lora_adapter("x", str(good)).bytes
        tokens(llm, [PROMPT], "x")
        llm.load_lora_adapter("x", str(good), load_inplace=True)
        tokens(llm, [PROMPT], "x")
        with pytest.raises(AdapterError, match="infinite or no numbers"):
            llm.load_lora_adapter("y", str(bad))
        assert llm.unload_lora_adapter("x") == size
        no_adapters(llm)
        return size

    for _ in range(2):
        size = round_trip()
    before = process.memory_info().rss
    for _ in range(6):
        round_trip()
    assert size > 10 << 20
    assert process.memory_info().rss - before < 3 * size, "18 adapters' memory, and it did not come back"


@pytest.mark.parametrize("cached", [False, True])
def test_reloaded_in_place_while_running(path, folders, solo, cached):
    """Those that run or wait keep the old version; new ones get the new; they share no block, in either direction."""
    llm = open_llm(path, enable_prefix_caching=cached, block_size=4, max_num_seqs=4)
    engine = llm.llm_engine
    llm.load_lora_adapter("x", str(folders["a1"]), lora_int_id=3)
    rounds = ["a1", "a2", "a3", "a2", "a1"]
    outputs = {}
    for number, current in enumerate(rounds):
        if number:
            llm.load_lora_adapter("x", str(folders[current]), load_inplace=True)
        for copy in range(2):
            engine.add_request(f"{number}/{copy}", PROMPT, greedy(12), LoRARequest("x", 3))
        for _ in range(2):
            outputs.update((output.request_id, output) for output in engine.step())
    assert len(engine.adapters._versions) == 5
    outputs.update(drive(engine))
    for number, current in enumerate(rounds):
        for copy in range(2):
            assert result(outputs[f"{number}/{copy}"]) == solo(folders[current], count=12), (number, copy)
    nothing_left(llm)
    # Once more: the blocks of equal files are found again, whatever the version, and those of others are not.
    for current, known in (("a3", cached), ("a4", False)):
        llm.load_lora_adapter("x", str(folders[current]), load_inplace=True)
        (output,) = ask(llm, [PROMPT], "x")
        assert result(output) == solo(folders[current])
        assert (output.num_cached_tokens > 0) is known
    (output,) = ask(llm, [PROMPT])
    assert result(output) == solo(None) and output.num_cached_tokens == 0


def test_reloaded_in_place_from_a_worse_folder(path, folders, solo, tmp_path):
    llm = open_llm(path)
    load(llm, folders, ["a1"])
    broken = shutil.copytree(folders["a2"], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(AdapterError, match="damaged"):
        llm.load_lora_adapter("a1", str(broken), load_inplace=True)
    assert tokens(llm, [PROMPT], "a1") == [solo(folders["a1"])]
    nothing_left(llm)


# -- aborting, forks, faults -----------------------------------------------------------------------------------------


def test_aborted_in_every_state(path, folders, solo, size):
    llm = open_llm(path, max_num_seqs=2, lora_device_bytes=2 * size)
    engine = llm.llm_engine
    load(llm, folders)
    for number in range(12):
        more = {"n": 3, "temperature": 1.0} if number % 5 == 1 else {}
        engine.add_request(str(number), PROMPT, greedy(8, **more) if not more else SamplingParams(
            max_tokens=8, ignore_eos=True, seed=1, **more), LoRARequest(NAMES[number % 8]))  # fmt: skip
    engine.abort_request(["3", "11"])
    for _ in range(4):
        engine.step()
    engine.abort_request([s.request.request_id for s in engine.scheduler.running] + ["6"])
    engine.check_integrity()
    survivors = set(engine.core.requests)
    outputs = drive(engine)
    assert set(outputs) == survivors and survivors
    for number in map(int, survivors):
        if number % 5 != 1:
            assert result(outputs[str(number)]) == solo(folders[NAMES[number % 8]], count=8)
    nothing_left(llm)
    for name in NAMES:
        llm.unload_lora_adapter(name)
    no_adapters(llm)


def test_forks_and_beams(path, folders):
    """n > 1 and beam search with adapters, crowded, preempted and on little memory: as alone."""
    names = ["a0", "a1", None, "a2"]
    sampled = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=9, ignore_eos=True, logprobs=2)
    beams = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)
    requests = [LoRARequest(name) if name else None for name in names]

    def run(llm: LLM, chosen: Sequence[int]) -> list[Any]:
        batch, adapters = [prompt(place, 15) for place in chosen], [requests[place] for place in chosen]
        many = llm.generate(batch, sampled, lora_request=adapters, use_tqdm=False)
        best = llm.beam_search(batch, beams, lora_request=adapters)
        nothing_left(llm)
        return [([(c.token_ids, c.logprobs) for c in one.outputs], two.sequences)
                for one, two in zip(many, best, strict=True)]  # fmt: skip

    def opened(**more: Any) -> LLM:
        llm = open_llm(path, **more)
        load(llm, folders, ["a0", "a1", "a2"])
        return llm

    calm = opened(enable_prefix_caching=False)
    alone = [run(calm, [place])[0] for place in range(4)]
    tight = opened(block_size=4, num_gpu_blocks_override=26, max_num_batched_tokens=11, max_loras=2)
    assert run(tight, range(4)) == alone
    assert tight.llm_engine.scheduler.num_preemptions > 0
    with pytest.raises(RequestError, match="no adapter 'gone' is loaded"):
        tight.beam_search([PROMPT], beams, lora_request=LoRARequest("gone"))
    nothing_left(tight)


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_that_raises(path, folders, solo, monkeypatch, eager):
    """Only the culprit's request ends; nobody then computes with an adapter that is not its own."""
    llm = open_llm(path, enforce_eager=eager)
    load(llm, folders, ["a1", "a2"])
    runner, scheduler = llm.llm_engine.executor.runner, llm.llm_engine.scheduler
    execute, owners = runner.execute, []

    def failing(plan: Any) -> Any:
        culprits = [
            chunk
            for chunk in plan.chunks
            if len(scheduler.request_of(chunk.sequence_id).prompt_ids) == 7 and chunk.start == 8
        ]
        if culprits:
            if len(plan.chunks) > 1:
                owners.append(len(plan.chunks))
            forward = runner.model.logits
            monkeypatch.setattr(runner.model, "logits", _raise)
            runner._decode._shapes.clear()  # a recording would not ask the model
            try:
                return execute(plan)
            finally:
                monkeypatch.setattr(runner.model, "logits", forward)
        return execute(plan)

    monkeypatch.setattr(runner, "execute", failing)
    adapters = ["a1", "a2", None, "a1", "a2"]
    prompts = [PROMPT, prompt(9, 7), PROMPT, prompt(9, 7), PROMPT]
    for _ in range(2):
        outputs = ask(llm, prompts, adapters)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["length", "error", "length", "error", "length"]
        assert "of the model" in outputs[1].outputs[0].stop_reason
        for place, name in ((0, "a1"), (2, None), (4, "a2")):
            assert result(outputs[place]) == solo(folders[name] if name else None)
        assert runner.adapter_slots._context.segments is None
        nothing_left(llm)
    assert owners, "the culprits were to share a step"


def _raise(*_: Any) -> Any:
    raise RuntimeError("a fault of the model")
