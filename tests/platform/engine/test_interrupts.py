"""Ctrl-C, other threads, and what an interrupt leaves of a call."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import SamplingParams
from tests.platform.engine.test_generate import GREEDY, drain, generate, nothing_leaks  # noqa: F401


def test_an_interrupt_leaves_nothing_running(tiny_llm, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny_llm, [[5], [6]])
    monkeypatch.undo()
    assert not tiny_llm.llm_engine.has_unfinished_requests()


def test_a_busy_engine_is_not_taken_over(tiny_llm):
    engine = tiny_llm.llm_engine
    engine.add_request("mine", [5, 6], GREEDY)
    with pytest.raises(ValueError, match="1 requests were added to llm_engine"):
        generate(tiny_llm, [[5]])
    assert set(drain(engine)) == {"mine"}


def test_ctrl_c_waits_for_the_step_and_leaves_nothing(tiny_llm, foreground):
    """The signal comes at a random moment; the tables are whole after each, which the fixture checks too."""
    engine = tiny_llm.llm_engine
    params = SamplingParams(n=3, seed=1, max_tokens=200, ignore_eos=True)
    for delay in (0.001, 0.004, 0.013, 0.05):
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()  # on a busy machine the signal comes before this returns
            generate(tiny_llm, [[5, 6, 7] * k for k in (1, 3, 5)], params)
            timer.join()  # or when all is done
        timer.join()
        engine.check_integrity()
        assert engine.pool.num_owned == 0 and not engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_ignored_where_it_was(tiny_llm, foreground):
    """As in the background job of a script, when somebody stops what runs in the foreground."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    step, engine = tiny_llm.llm_engine.step, tiny_llm.llm_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", lambda: (signal.raise_signal(signal.SIGINT), step())[1])
        output = generate(tiny_llm, [[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_calls_from_several_threads_wait_for_each_other(tiny_llm):
    expected = [generate(tiny_llm, [[5 + i] * 9])[0].outputs[0].token_ids for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda i: generate(tiny_llm, [[5 + i] * 9])[0], range(4)))
    assert [o.outputs[0].token_ids for o in outputs] == expected
