"""Blocks on disk: found by another engine, with the bits of what was never stored; or not at all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.checkpoint.files import SINGLE
from quire.platform.execution import host_cache, worker
from quire.platform.kv import disk, transfers
from quire.platform.kv.disk import DiskConnector
from quire.platform.sampling.params import BeamSearchParams
from tests.platform import windowed
from tests.platform.engine import test_promise as promise
from tests.platform.engine.kept import SlowReads, account, engine, files, on_disk

pytestmark = pytest.mark.usefixtures("one_thread", "patient")

SOME = list(range(promise.REQUESTS))
BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # layers, keys and values, heads, numbers of a head, tokens, bytes
TAKEN = 8192  # by a file of one
LONG = [3 + place % 300 for place in range(120)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", params=["tiny_path", "tiny_bf16_path"], ids=["fp32", "bf16"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def alone(path: str, one_thread: None) -> dict[int, Any]:
    llm = LLM(path, enable_prefix_caching=False, max_num_batched_tokens=512)
    return {i: promise.answers(llm, [i])[i] for i in SOME}


@pytest.fixture(scope="module")
def expected(tiny_path: Path, one_thread: None) -> tuple[Any, ...]:
    return ask(LLM(str(tiny_path), enable_prefix_caching=False))[:2]


def ask(llm: LLM, ids: list[int] = LONG) -> tuple[Any, ...]:
    """Tokens, their logprobs, and how many of the prompt's were cached."""
    output = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0]
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens


@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_crowd_in_another_engine(path: str, alone: dict[int, Any], block_size: int, tmp_path: Path) -> None:
    """Chunks, prefix hits in the pool and on disk, and preemptions, in any mixture."""
    small = {"block_size": block_size, "num_gpu_blocks_override": 240 // block_size, "max_num_batched_tokens": 40}
    for life in range(3):
        with engine(path, tmp_path, **small) as llm:
            assert promise.answers(llm, SOME) == alone
            counts = account(llm).counts
            assert llm.llm_engine.scheduler.num_preemptions > 0
            assert (counts.loaded > 0) or life == 0
            assert counts.refused == counts.failed == 0


def test_what_was_loaded_counts_as_cached(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as llm:
        assert ask(llm) == (*expected, 0)
    with engine(tiny_path, tmp_path) as llm:
        assert ask(llm) == (*expected, 112), "all full blocks but the last token's"
        counts, kv = account(llm).counts, llm.llm_engine.scheduler.kv
        assert (counts.loaded, counts.loaded_bytes) == (14, 14 * BLOCK_BYTES)
        assert kv.prefix_hits == 112
        assert counts.stored == 0, "what is there is not written again"
        llm.reset_prefix_cache()
        assert ask(llm) == (*expected, 112), "the pool has forgotten it, and the disk has not"
        longer = llm.generate({"prompt_token_ids": LONG + LONG[:20]}, GREEDY, use_tqdm=False)[0]
        assert longer.num_cached_tokens == 120
        assert account(llm).counts.loaded == 28
        values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert values["quire_kv_transfer_loaded_blocks"] == 28
        assert values["quire_kv_transfer_held_bytes"] == sum(TAKEN for _ in files(tmp_path))


def test_a_process_of_its_own(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
    with engine(tiny_path, tmp_path, executor="process") as llm:
        assert ask(llm) == (*expected, 112), "in a process that has never computed it"


@pytest.mark.slow
@pytest.mark.parametrize("several", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_processes_each_with_its_part(
    tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path, several: str
) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
    for cached in (0, 112):
        with engine(tiny_path, tmp_path, **{several: 2}) as llm:
            assert ask(llm) == (*expected, cached), "each of two has its own part of a block"
    parts = [one for one in files(tmp_path) if "-1-2" in str(one)]
    assert parts
    for one in parts:
        one.unlink()
    with engine(tiny_path, tmp_path, **{several: 2}) as llm:
        assert ask(llm) == (*expected, 0), "a block of which a part is missing is not there"
        assert account(llm).counts.failed == 0


def test_int8(tiny_path: Path, tmp_path: Path) -> None:
    alone = ask(LLM(str(tiny_path), kv_cache_dtype="int8", enable_prefix_caching=False))[:2]
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)  # floats
    for cached in (0, 112):
        with engine(tiny_path, tmp_path, kv_cache_dtype="int8") as llm:
            assert ask(llm) == (*alone, cached)


@pytest.fixture(scope="module", params=["mixed", pytest.param("odd", marks=pytest.mark.slow)])
def with_windows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    site = str(windowed.install(tmp_path_factory.mktemp("site")))
    sys.path.insert(0, site)
    folder = tmp_path_factory.mktemp(request.param)
    windowed.make(folder, request.param)
    yield str(folder)
    sys.path.remove(site)


def test_groups_of_layers_with_windows(with_windows: str, tmp_path: Path) -> None:
    """A hit needs all of the full layers' blocks, and of the others the last window."""
    llm = LLM(with_windows, enable_prefix_caching=False, max_num_batched_tokens=512)
    alone = {i: promise.answers(llm, [i])[i] for i in SOME}
    long = ask(llm)[:2]
    for life in range(2):
        with engine(with_windows, tmp_path, num_gpu_blocks_override=60, max_num_batched_tokens=30) as llm:
            assert len(llm.llm_engine.executor.facts.windows) > 1
            assert promise.answers(llm, SOME) == alone
            assert ask(llm) == (*long, 112 if life else 0)
            assert account(llm).counts.loaded > 0 or life == 0
    one = files(tmp_path)  # without some of them, hits end earlier, and stay right
    for place in range(0, len(one), 7):
        one[place].unlink()
    with engine(with_windows, tmp_path, num_gpu_blocks_override=60, max_num_batched_tokens=30) as llm:
        assert promise.answers(llm, SOME) == alone
        assert ask(llm)[:2] == long


@pytest.mark.parametrize("faults", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def test_blocks_that_are_gone_when_they_are_wanted(
    path: str, alone: dict[int, Any], faults: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, read = random.Random(5), DiskConnector.read

    def faulty(self: DiskConnector, key: bytes, into: memoryview) -> bool:
        return rng.random() >= faults and read(self, key, into)

    monkeypatch.setattr(DiskConnector, "read", faulty)
    for _ in range(2):
        with engine(path, tmp_path, num_gpu_blocks_override=30, max_num_batched_tokens=40) as llm:
            assert promise.answers(llm, SOME) == alone


def damage(one: Path, place: int) -> None:
    data = bytearray(one.read_bytes())
    kind = place % 4
    if kind == 0:
        data[64 + place % (len(data) - 64)] ^= 0x40
    elif kind == 1:
        del data[-1 - place :]
    elif kind == 2:
        data = bytearray(os.urandom(len(data)))
    else:
        data = data + data
    one.write_bytes(data)


def test_damaged_and_reordered_files_are_computed(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
    stored = files(tmp_path)
    for place, one in enumerate(stored):
        damage(one, place)
    with engine(tiny_path, tmp_path) as llm:
        assert ask(llm) == (*expected, 0)
        assert account(llm).counts.refused == 14, "all that were asked for"
    assert files(tmp_path) == stored, "they were written anew"
    contents = [one.read_bytes() for one in stored]
    for one, data in zip(stored, contents[1:] + contents[:1], strict=True):
        one.write_bytes(data)
    with engine(tiny_path, tmp_path) as llm:
        assert ask(llm) == (*expected, 0)
        assert account(llm).counts.refused == 14


def changed(path: Path, target: Path, name: str) -> Path:
    """A copy of a checkpoint with one number of a weight, or of its configuration, changed."""
    folder = Path(shutil.copytree(path, target))
    if name == "weights":
        tensors = load_file(folder / SINGLE)
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    else:
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
        assert "1e-05" in config.read_text()
    return folder


def test_only_the_same_model_finds_them(tiny_path: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with engine(tiny_path, store) as llm:
        ask(llm)
    same = Path(shutil.copytree(tiny_path, tmp_path / "same"))
    with engine(same, store) as llm:
        assert ask(llm)[2] == 112, "the same files elsewhere"
    for name, settings in (
        ("weights", {}),
        ("config", {}),
        (None, {"dtype": "bfloat16"}),
        (None, {"block_size": 4}),
        (None, {"hf_overrides": {"rope_theta": 5000.0}}),
        (None, {"quantization": "int8"}),
    ):
        model = changed(tiny_path, tmp_path / name, name) if name else tiny_path
        alone = ask(LLM(str(model), enable_prefix_caching=False, **settings))[:2]
        with engine(model, store, **settings) as llm:
            assert ask(llm) == (*alone, 0), (name, settings)


def test_salts_are_kept_apart(tiny_path: Path, tmp_path: Path) -> None:
    def cached(llm: LLM, salt: str | None) -> int:
        prompt = {"prompt_token_ids": LONG} | ({"cache_salt": salt} if salt else {})
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    with engine(tiny_path, tmp_path) as llm:
        cached(llm, "one")
    with engine(tiny_path, tmp_path) as llm:
        assert [cached(llm, salt) for salt in (None, "two", "one")] == [0, 0, 112]


def test_an_abort_while_blocks_are_read(
    tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
    slow = SlowReads(DiskConnector.read)
    monkeypatch.setattr(DiskConnector, "read", lambda *given: slow(*given))
    with engine(tiny_path, tmp_path) as llm:
        steps = llm.llm_engine
        steps.add_request("waits", {"prompt_token_ids": LONG}, GREEDY)
        steps.add_request("waits too", {"prompt_token_ids": LONG}, GREEDY)
        steps.add_request("passes", {"prompt_token_ids": LONG[1:20]}, GREEDY)
        outputs = {}
        while "passes" not in outputs:
            outputs.update({output.request_id: output for output in steps.step() if output.finished})
        assert slow.begun.wait(10) and account(llm).is_reading
        assert not set(outputs) - {"passes"} and len(steps.scheduler.waiting) == 2
        steps.abort_request("waits")
        steps.check_integrity()
        steps.step()
        slow.go.set()
        while steps.has_unfinished_requests():
            outputs.update({output.request_id: output for output in steps.step() if output.finished})
        assert outputs["waits too"].outputs[0].token_ids == expected[0], "it read them itself then"
        assert outputs["waits too"].num_cached_tokens == 112
        assert steps.pool.num_owned == 0 and not steps.executor.runner.transfers._reads  # nothing is held for anybody


def test_who_has_waited_long_enough_is_computed(
    tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
    slow = SlowReads(DiskConnector.read)
    monkeypatch.setattr(DiskConnector, "read", lambda *given: slow(*given))
    monkeypatch.setattr(transfers, "PATIENCE_SECONDS", 0.05)
    with engine(tiny_path, tmp_path) as llm:
        assert ask(llm) == (*expected, 0)
        slow.go.set()
        assert ask(llm, [*LONG[:100], 7])[2] == 96, "from the pool"


def test_several_that_begin_alike_read_once(tiny_path: Path, tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
    with engine(tiny_path, tmp_path) as llm:
        outputs = llm.generate([{"prompt_token_ids": [*LONG[:112], i]} for i in range(6)], GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [112] * 6
        assert account(llm).counts.loaded == 14


def test_more_than_may_be_read_at_once(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
        ask(llm, LONG[::-1])
    settings = on_disk(tmp_path, max_loading_bytes=5 * BLOCK_BYTES)
    llm = LLM(str(tiny_path), debug=True, **settings)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in (LONG, LONG[::-1])], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [40, 40]
    assert outputs[0].outputs[0].token_ids == expected[0]
    llm.llm_engine.close()
    llm = LLM(str(tiny_path), debug=True, **on_disk(tmp_path / "new", max_storing_bytes=5 * BLOCK_BYTES))
    ask(llm)
    counts = account(llm).counts
    assert counts.dropped > 0 and counts.stored + counts.dropped == 15
    llm.reset_prefix_cache()
    ask(llm)
    assert account(llm).counts.stored > counts.stored, "what was dropped is stored another time"
    llm.llm_engine.close()


def test_the_bound(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    most = 20 * TAKEN
    with engine(tiny_path, tmp_path, most) as llm:
        for shift in range(4):
            ask(llm, LONG[shift:] + LONG[:shift])
            held = account(llm).counts.held_bytes  # when all is written
            assert held == sum(-(-one.stat().st_size // 4096) * 4096 for one in files(tmp_path)) <= most
        llm.reset_prefix_cache()
        assert ask(llm) == (*expected, 0), "it had to go"
        account(llm)
        llm.reset_prefix_cache()
        assert ask(llm)[2] > 0


def test_blocks_that_go_for_others_of_their_step_are_not_taken_for_there(tiny_path: Path, tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path, 3 * TAKEN) as llm:
        ask(llm)
        assert account(llm).held == {bytes.fromhex(one.name) for one in files(tmp_path)} and len(files(tmp_path)) == 3


def test_a_full_disk(
    tiny_path: Path,
    expected: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = os.open

    def full(path: Any, *given: Any) -> int:
        if str(path).endswith(".new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *given)

    monkeypatch.setattr(disk.os, "open", full)
    with engine(tiny_path, tmp_path) as llm:
        for _ in range(2):
            assert ask(llm)[:2] == expected
            llm.reset_prefix_cache()
        counts = account(llm).counts
    assert counts.failed > 0 and counts.stored == 0 and files(tmp_path) == []
    assert caplog.text.count("No space left") == 1


def test_sleep(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as llm:
        ask(llm)
        llm.sleep()
        llm.wake_up()
        account(llm)  # else it may be half a second until the engine hears of what was stored
        assert ask(llm) == (*expected, 112), "blocks come back from the disk"


def test_swapped_sequences(path: str, alone: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: 64)
    monkeypatch.setattr(host_cache, "_PIECE_BYTES", 5_000)
    for _ in range(2):
        with engine(path, tmp_path, num_gpu_blocks_override=30) as llm:
            assert promise.answers(llm, SOME) == alone
            assert llm.llm_engine.scheduler.num_swaps > 0


@pytest.mark.slow
def test_beams_and_drafts(tiny_path: Path, tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in promise.prompts(6)]

    def run(llm: LLM) -> list[Any]:
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12))
        return [(beam.tokens, beam.cum_logprob) for output in outputs for beam in output.sequences]

    expected = run(LLM(str(tiny_path)))
    for _ in range(2):
        with engine(tiny_path, tmp_path, num_gpu_blocks_override=60, block_size=4) as llm:
            assert run(llm) == expected
    alone = ask(LLM(str(tiny_path)))[:2]
    for cached in (0, 112):
        with engine(tiny_path, tmp_path, speculative_config={"method": "ngram"}) as llm:
            assert ask(llm) == (*alone, cached)
