"""#engine shows the engine as it is: blocks that fill and come back, who runs, what steps held."""

from __future__ import annotations

import re

import pytest

from tests.browser.proxy import PathProxy
from tests.browser.servers import KEY
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import LocalServer
from tests.server.events.helpers import Asking, stepping

BLOCK = 8  # tokens
LETTERS = [60, 61, 62, 63, 64, 65]


def is_idle(tab: Tab) -> None:
    tab.expect("request-row").to_have_count(0)
    tab.expect("blocks-owned").to_have_text("0")


def test_blocks_fill_and_are_free_again(open_tab: OpenTab, held: LocalServer) -> None:
    """One more for eight tokens; at the end, full ones are found again by what is in them."""
    tab = open_tab(held.url, "#engine")
    tab.expect("block-map").to_be_visible()
    is_idle(tab)
    cached = int(tab.find("blocks-cached").inner_text().replace(",", ""))
    with stepping(held) as step:
        asking = Asking(held, LETTERS * 20, max_tokens=1 + 80 * BLOCK)
        tab.expect("request-row").to_have_count(1)
        tab.expect("request-row").to_have_attribute("data-state", "waiting")
        is_said(tab, "blocks-owned", 0)
        step(1)
        tab.expect("request-row").to_have_attribute("data-state", "running")
        tab.expect("running").to_have_text("1")
        is_said(tab, "blocks-owned", 120 // BLOCK)
        step(40 * BLOCK)
        is_said(tab, "blocks-owned", 120 // BLOCK + 40)
        tab.expect("step-said").to_contain_text("median")
        tab.check_accessibility()
        step(1000)
        is_idle(tab)
    is_said(tab, "blocks-cached", cached + 120 // BLOCK + 80)
    assert asking.result()["usage"]["completion_tokens"] == 1 + 80 * BLOCK


def is_said(tab: Tab, name: str, number: int) -> None:
    tab.expect(name).to_have_text(f"{number:,}")


def test_a_shared_beginning_is_shown_as_shared(open_tab: OpenTab, held: LocalServer) -> None:
    tab = open_tab(held.url, "#engine")
    tab.expect("block-map").to_be_visible()
    with stepping(held) as step:
        asking = []
        for last in (70, 71):
            asking.append(Asking(held, [66, *LETTERS * 20, last], max_tokens=5))
            tab.expect("request-row").to_have_count(len(asking))
            step(1)
            is_said(tab, "running", len(asking))
        is_said(tab, "blocks-shared", 120 // BLOCK)
        step(1000)
        is_idle(tab)
    tab.expect("blocks-shared").to_have_text("0")
    for one in asking:
        one.result()


def test_who_waits_is_told_from_who_runs(open_tab: OpenTab, held: LocalServer) -> None:
    """Of five requests on four seats."""
    tab = open_tab(held.url, "#engine")
    tab.expect("block-map").to_be_visible()
    with stepping(held) as step:
        asking = [Asking(held, [70 + number, *LETTERS], max_tokens=5) for number in range(5)]
        tab.expect("waiting").to_have_text("5")
        step(1)
        tab.expect("running").to_have_text("4")
        tab.expect("waiting").to_have_text("1")
        states = tab.find("request-row").evaluate_all("rows => rows.map(row => row.dataset.state)")
        assert states == ["running"] * 4 + ["waiting"]
        step(1000)
        is_idle(tab)
    for one in asking:
        one.result()


def test_keys_walk_through_the_blocks(open_tab: OpenTab, held: LocalServer) -> None:
    tab = open_tab(held.url, "#engine")
    map = tab.find("block-map").get_by_role("slider")
    map.focus()
    for key, number in (("End", "4,095"), ("Home", "0"), ("ArrowRight", "1"), ("ArrowLeft", "0")):
        tab.page.keyboard.press(key)
        tab.expect("block-said").to_contain_text(re.compile(rf"\b{number}\b"))
        assert map.get_attribute("aria-valuetext") == tab.find("block-said").inner_text()


def test_the_engine_is_watched_behind_a_key_and_a_path(open_tab: OpenTab, proxy: PathProxy) -> None:
    tab = open_tab(proxy.url, "#engine")
    tab.expect_fault("status of 401")
    tab.give_key(KEY)
    tab.expect("block-map").to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_in_both_looks(open_tab: OpenTab, held: LocalServer, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    tab = open_tab(held.url, "#engine", color_scheme=scheme, **phone)
    with stepping(held) as step:
        asking = Asking(held, [ord(scheme[0]), *LETTERS * 150], max_tokens=5)
        tab.expect("request-row").to_have_count(1)
        step(2)  # a step has room for 512 tokens
        is_said(tab, "blocks-owned", 901 // BLOCK + 1)
        tab.check_width()
        tab.check_accessibility()
        step(1000)
    asking.result()
