"""Engines that read what another one stores, while it does (`kv_role="kv_consumer"`): the same bits, and no file of
theirs."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError, SamplingParams
from quire.platform.kv import disk_reader
from quire.platform.kv.connector import BlockLayout
from quire.platform.kv.disk import DiskConnector
from quire.platform.kv.disk_reader import DiskReader
from tests.platform.engine import test_promise as promise
from tests.platform.engine.kept import account, engine, files

pytestmark = pytest.mark.usefixtures("one_thread", "patient")

LONG = [3 + place % 300 for place in range(120)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
BLOCKS = 15  # of which a request of LONG and its answer fill


@contextmanager
def consumer(path: Path, folder: Path, **settings: Any) -> Iterator[LLM]:
    config = {
        "kv_connector": "DiskConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"path": str(folder), "min_tokens": 1},
    }
    llm = LLM(str(path), debug=True, kv_transfer_config=config, **settings)
    try:
        yield llm
        llm.llm_engine.check_integrity()
    finally:
        llm.llm_engine.close()


def ask(llm: LLM) -> tuple[Any, ...]:
    output = llm.generate({"prompt_token_ids": LONG}, GREEDY, use_tqdm=False)[0]
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens


def wait_for(llm: LLM, blocks: int) -> None:
    """Until so many are known."""
    deadline = time.monotonic() + 60
    while len(account(llm).held) != blocks:
        assert time.monotonic() < deadline, f"{len(account(llm).held)} of {blocks}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def expected(tiny_path: Path, one_thread: None) -> tuple[Any, ...]:
    return ask(LLM(str(tiny_path), enable_prefix_caching=False))[:2]


@pytest.mark.parametrize("settings", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)])
def test_what_another_engine_stores_meanwhile(
    settings: dict[str, Any], tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    parts = settings.get("tensor_parallel_size", 1)
    with consumer(tiny_path, tmp_path, **settings) as one, consumer(tiny_path, tmp_path, **settings) as other:
        assert ask(one) == (*expected, 0)
        assert account(one).counts.stored == 0 and files(tmp_path) == [], "it writes nothing"
        with engine(tiny_path, tmp_path, **settings) as owner:
            assert ask(owner) == (*expected, 0)
            account(owner)
            assert len(files(tmp_path)) == BLOCKS * parts
            for llm in (one, other):
                wait_for(llm, BLOCKS)
                llm.reset_prefix_cache()
                assert ask(llm) == (*expected, 112)
                assert account(llm).counts.loaded == 14 * parts
            owner.reset_prefix_cache()
            assert ask(owner) == (*expected, 112), "nothing was taken from it"
        with consumer(tiny_path, tmp_path, **settings) as late:
            assert ask(late) == (*expected, 112), "its owner has gone"


def test_blocks_that_are_damaged_or_gone(tiny_path: Path, expected: tuple[Any, ...], tmp_path: Path) -> None:
    with engine(tiny_path, tmp_path) as owner:
        ask(owner)
    stored = files(tmp_path)
    contents = [one.read_bytes() for one in stored]
    with consumer(tiny_path, tmp_path) as llm:
        for one, data in zip(stored, contents[1:] + contents[:1], strict=True):
            one.write_bytes(data)
        assert ask(llm) == (*expected, 0)
        assert account(llm).counts.refused == 14 and files(tmp_path) == stored, "they are their owner's to remove"
    for one in stored:
        one.unlink()
    with consumer(tiny_path, tmp_path) as llm:
        for one, data in zip(stored, contents, strict=True):
            one.write_bytes(data)
        wait_for(llm, BLOCKS)
        for one in stored:
            one.unlink()
        assert ask(llm) == (*expected, 0)
        assert account(llm).counts.failed == account(llm).counts.refused == 0
        llm.reset_prefix_cache()
        for one, data in zip(stored, contents, strict=True):
            one.write_bytes(data)
        wait_for(llm, BLOCKS)
        assert ask(llm) == (*expected, 112), "they have come again"


def test_a_crowd_beside_an_owner_that_needs_the_room(tiny_path: Path, tmp_path: Path) -> None:
    """Files come and go all the time."""
    some = list(range(promise.REQUESTS))
    llm = LLM(str(tiny_path), enable_prefix_caching=False, max_num_batched_tokens=512)
    alone = {i: promise.answers(llm, [i])[i] for i in some}
    small = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40}
    with engine(tiny_path, tmp_path, **small) as owner:
        assert promise.answers(owner, some) == alone
    stored = {one: one.read_bytes() for one in files(tmp_path)}
    ended, rng = threading.Event(), random.Random(3)

    def own() -> None:
        while not ended.wait(0.001):
            one = rng.choice(list(stored))
            if one.exists():
                one.unlink()
            else:
                one.with_suffix(".new").write_bytes(stored[one])
                one.with_suffix(".new").replace(one)

    owning = threading.Thread(target=own)
    owning.start()
    try:
        with consumer(tiny_path, tmp_path, **small) as llm:
            for _ in range(2):
                assert promise.answers(llm, some) == alone
                llm.reset_prefix_cache()
            counts = account(llm).counts
            assert counts.loaded > 0 and counts.refused == counts.failed == counts.stored == 0
    finally:
        ended.set()
        owning.join()


def test_a_folder_that_others_may_reach(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "quire-kv").mkdir(mode=0o755)
    with pytest.raises(QuireError, match="others may reach it"), consumer(tiny_path, tmp_path):
        pass


def test_files_that_come_in_one_tick_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's time does not tell that it has changed again."""
    monkeypatch.setattr(disk_reader, "_LOOK_SECONDS", 1e6)  # nobody looks but this test
    keys = [bytes([7, number]) + bytes(30) for number in range(4)]
    told = BlockLayout("a" * 64, 8, 0, 1, {"path": tmp_path, "max_bytes": 10**6})
    owner, reader = DiskConnector(told), DiskReader(told)
    part = tmp_path / "quire-kv" / ("a" * 64 + "-0-1") / "07"

    def write(number: int) -> None:
        owner.write(keys[number], memoryview(bytes(8)))
        os.utime(part, ns=(10**18, 10**18))

    assert list(reader.held()) == [] and reader.news() == ([], [])
    write(0)
    reader.look()
    assert reader.news() == ([keys[0]], [])
    write(1)
    reader.look()
    assert reader.news() == ([keys[1]], [])
    assert reader.read(keys[1], memoryview(bytearray(8))) and not reader.read(keys[3], memoryview(bytearray(8)))
    (part / keys[0].hex()).unlink()
    reader.look()
    assert reader.news() == ([], [keys[0]])
    monkeypatch.setattr(disk_reader, "_CHANGING_SECONDS", -1.0)
    write(2)
    os.utime(part, ns=(2 * 10**18, 2 * 10**18))
    reader.look()
    assert reader.news() == ([keys[2]], [])
    owner.write(keys[3], memoryview(bytes(8)))
    os.utime(part, ns=(2 * 10**18, 2 * 10**18))
    listed = []
    monkeypatch.setattr(disk_reader, "_names", listed.append)
    reader.look()
    assert listed == [], "a folder that has not changed for long is not read"
    owner.close()
    reader.close()
