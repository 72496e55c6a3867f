"""Columns side by side are one batch; blocks that left the map are told. The engine steps when it is told to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.demo import adapter_path
from quire.platform.execution import worker
from tests.browser.playground import Playground
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import LocalServer
from tests.server.events.helpers import Asking, stepping, until, watching
from tests.server.fixtures import TEMPLATE, make_model

STAR = "There is a green star and a black triangle. What color is the star?"
ANSWERS = {"quire-demo": "Green.", "french": "Vert.", "shout": "GREEN."}


@pytest.fixture(scope="module")
def bundled(one_thread: None) -> Iterator[LocalServer]:
    with LocalServer({"enable_lora": True, "num_gpu_blocks_override": 512}) as server:
        for name in ("french", "shout"):
            server.engine.llm_engine.load_lora_adapter(name, str(adapter_path(name)))
        yield server


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[LocalServer]:
    """A pool in main memory swaps nothing, so this one is told to; it has room for one of two requests."""
    model = make_model(tmp_path_factory.mktemp("swapping"), TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "count_swap_blocks", lambda *_: 20)
        server = LocalServer({"model": str(model), "num_gpu_blocks_override": 8})
    with server:
        yield server


def rows(tab: Tab, state: str) -> list[str]:
    return list(tab.page.locator(f"[data-test=request-row][data-state={state}]").all_inner_texts())


def last_step(tab: Tab) -> None:
    """Choose the newest of the timeline's steps."""
    tab.find("step-timeline").get_by_role("slider").press("End")


def test_three_columns_are_one_batch(open_tab: OpenTab, bundled: LocalServer) -> None:
    """The engine's own account: all three wait; one step computes all three prompts, and one a token of each."""
    with stepping(bundled) as step, bundled.http() as http, watching(http) as states:
        tab = open_tab(bundled.url)
        view = open_tab(bundled.url, "#engine")
        chat = Playground(tab, temperature=0)
        chat.columns(*ANSWERS)
        chat.send(STAR)
        waiting = until(states, lambda state: len(state.requests) == 3)
        assert sorted(str(row.adapter) for row in waiting.requests) == ["None", "french", "shout"]
        assert "running" not in {row.state for row in waiting.requests} and not waiting.steps
        view.expect("waiting").to_have_text("3")

        step(1)
        state = until(states, lambda state: state.steps)
        (first,) = state.steps
        assert (first.sequences, first.adapters, first.decode_tokens) == (3, 2, 0)
        assert first.prefill_tokens == sum(row.prompt_tokens for row in state.requests)
        assert [(row.state, row.output_tokens) for row in state.requests] == [("running", 1)] * 3

        step(1)
        (second,) = until(states, lambda state: state.steps).steps
        assert (second.sequences, second.adapters, second.decode_tokens, second.prefill_tokens) == (3, 2, 3, 0)
        # And the page shows it: three that run, by their adapters, and the step that they share.
        view.expect("running").to_have_text("3")
        shown = "".join(rows(view, "running"))
        assert all(name in shown for name in ("base", "french", "shout"))
        last_step(view)
        view.expect("step-said").to_contain_text("3 answer tokens")
        view.expect("step-said").to_contain_text("2 adapters")
        view.check_accessibility()
        step(1000)
        assert chat.answers() == list(ANSWERS.values())
        view.expect("request-row").to_have_count(0)


def test_blocks_in_main_memory_are_shown(open_tab: OpenTab, swapping: LocalServer) -> None:
    """Two requests grow; the blocks of the later one wait in main memory."""
    server = swapping
    with stepping(server) as step, server.http() as http, watching(http) as states:
        tab = open_tab(server.url, "#engine")
        asking = [Asking(server, [first, *range(60, 83)], max_tokens=30) for first in (70, 80)]
        state = until(states, lambda state: len(state.requests) == 2)
        tab.expect("waiting").to_have_text("2")
        tab.expect("swapped").to_have_count(0)
        while all(row.state != "swapped" for row in state.requests):
            step(1)
            state = until(states, lambda state: state.steps)
        (gone,) = (row for row in state.requests if row.state == "swapped")
        tab.expect("swapped").to_contain_text(f"{state.kv.swapped} blocks swapped out to main memory, of room for 20")
        tab.expect("swapped").to_contain_text(f"#{gone.number}")
        (row,) = rows(tab, "swapped")
        assert f"#{gone.number}" in row and "swapped" in row
        tab.check_accessibility()
        step(1000)
        tab.expect("swapped").to_have_count(0)
        tab.expect("request-row").to_have_count(0)
    for one in asking:
        assert one.result()["usage"]["completion_tokens"] == 30
