"""Pages committed while the engine is idle: how many, which, when not, and that the thread ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from weakref import ref

import pytest
import torch

from quire import LLM, SamplingParams, huge_pages
from quire.platform.execution import ahead
from quire.platform.execution.ahead import PagesAhead

BLOCKS, BLOCK = 64, 1 << 19  # of half a MB: four in a huge page


@pytest.fixture(autouse=True)
def _small(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 20 << 20)  # of two tensors: 16 blocks of each, and a page of each
    monkeypatch.setattr(ahead, "LEAST_AVAILABLE", 0)


@pytest.fixture
def asked(monkeypatch) -> Iterator[list[tuple[int, int, int]]]:
    """(tensor's address, first byte, end) of all that is committed, where the system need not be able to."""
    asked: list[tuple[int, int, int]] = []
    others = {*threading.enumerate()} - {threading.current_thread()}  # of engines that other tests have left

    def populate(tensor: torch.Tensor, first: int, end: int) -> bool:
        if threading.current_thread() not in others:
            asked.append((tensor.data_ptr(), first, end))
        return True

    monkeypatch.setattr(huge_pages, "populate", populate)
    yield asked
    for thread in [one for one in threading.enumerate() if one.name == "quire-pages" and one not in others]:
        thread.join(5)


def tensors() -> list[torch.Tensor]:
    return [huge_pages.allocate(BLOCKS * BLOCK).view(BLOCKS, BLOCK) for _ in range(2)]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def waits(pages: PagesAhead) -> None:
    """Until there is nothing left to do."""
    until(lambda: pages._wake.empty() and pages.advance() is None)


def spans(asked: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Blocks first .. end of each tensor, which have the same."""
    each = [
        [(first // BLOCK, end // BLOCK) for at, first, end in asked if at == one] for one in {a for a, _, _ in asked}
    ]
    assert len(each) == 2 and each[0] == each[1]
    return each[0]


def test_a_bounded_number_of_bytes_ahead_of_what_was_used(asked):
    pages = PagesAhead(tensors(), first=3)
    waits(pages)
    assert spans(asked) == [(3, 7), (7, 11), (11, 15), (15, 19)], "16 blocks from the first one that is ever used"
    asked.clear()
    pages.take([(), (3, 5), (9,)])
    waits(pages)
    assert spans(asked) == [(19, 23), (23, 26)], "16 behind block 9"
    asked.clear()
    pages.take([(4,)])
    waits(pages)
    assert not asked, "a block that was used before"
    pages.take([(40, 41)])
    waits(pages)
    assert spans(asked)[0] == (42, 46), "what steps have touched by themselves is passed over"
    pages.take([(BLOCKS - 1,)])
    waits(pages)
    assert spans(asked)[-1][1] <= BLOCKS
    pages.close()


def test_nothing_while_a_step_runs_or_memory_is_given_back_or_scarce(asked, monkeypatch):
    pages = PagesAhead(tensors())
    waits(pages)
    asked.clear()
    pages.take([(20,)])
    with pages:
        assert pages.advance() == ahead.QUIET_SECONDS and not asked
    waits(pages)
    assert asked
    pages.pause()
    asked.clear()
    pages.take([(30,)])
    assert pages.advance() is None and not asked
    monkeypatch.setattr(ahead, "LEAST_AVAILABLE", 1 << 60)
    pages.resume()
    waits(pages)
    assert not asked
    monkeypatch.setattr(ahead, "LEAST_AVAILABLE", 0)
    waits(pages)
    assert spans(asked)[0][0] == 0, "all that there was went"
    pages.close()


def test_the_thread_ends_with_its_owner_and_where_the_system_cannot(asked, monkeypatch):
    closed = PagesAhead(tensors())
    closed.close()
    assert not closed.is_alive
    closed.close()
    forgotten = PagesAhead(tensors())
    thread, gone = forgotten._thread, ref(forgotten)
    del forgotten
    gc.collect()
    thread.join(60)
    assert not thread.is_alive() and gone() is None
    monkeypatch.setattr(huge_pages, "populate", lambda *_: False)
    unable = PagesAhead(tensors())
    unable._thread.join(60)
    assert not unable.is_alive
    unable.take([(5,)])  # does no harm
    with unable:
        pass


def test_memory_grows_by_what_is_asked_for_and_keeps_its_contents():
    memory = huge_pages.allocate(64 << 20)
    memory[5 << 20] = 7
    before = _resident()
    done = huge_pages.populate(memory, 4 << 20, 36 << 20)
    grown = _resident() - before
    assert memory[5 << 20] == 7 and not memory[6 << 20 :].any()
    assert (24 << 20 if done else 0) <= grown <= 44 << 20
    assert not huge_pages.populate(memory, 8, 8)
    assert not huge_pages.populate(torch.empty(4096, dtype=torch.uint8), 0, 4096), "not of `allocate`"


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def test_answers_are_the_same_with_and_without_it(tiny_path, monkeypatch):
    def answers() -> list[object]:
        llm = LLM(str(tiny_path), num_gpu_blocks_override=256)
        ids = [[5, 6, 7, 8] * 9, [9, 4, 3]]
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
        found: list[object] = []
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
            found += [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]
            time.sleep(0.05)
        worker = llm.llm_engine.executor.worker
        llm.sleep()
        llm.wake_up()
        outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        found += [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]
        llm.llm_engine.close()
        assert not worker.ahead.is_alive
        return found

    with_it = answers()
    monkeypatch.setattr(huge_pages, "populate", lambda *_: False)
    assert answers() == with_it
