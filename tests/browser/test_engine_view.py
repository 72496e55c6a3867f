"""#engine shows the engine as it is: blocks that fill and come back, who runs, what steps held."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.browser.proxy import PathProxy
from tests.browser.servers import KEY
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import ServerProcess

AT_LEAST_100 = re.compile(r"^\d{3}|^\d,")


@contextmanager
def asking(server: ServerProcess, prompt: str, **fields: object) -> Iterator[None]:
    """A request that runs meanwhile, until its client leaves."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "endless", "messages": messages, "max_tokens": 15_000, "temperature": 0, "stream": True, **fields}
    with server.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        yield


def is_idle(tab: Tab) -> None:
    tab.expect("request-row").to_have_count(0)
    tab.expect("blocks-owned").to_have_text("0")


def test_blocks_fill_and_are_free_again(open_tab: OpenTab, endless: ServerProcess) -> None:
    tab = open_tab(endless.url, "#engine")
    tab.expect("block-map").to_be_visible()
    is_idle(tab)
    with asking(endless, "how much room does this take?"):
        tab.expect("request-row").to_have_count(1)
        tab.expect("request-row").to_have_attribute("data-state", "running")
        tab.expect("blocks-owned").to_have_text(AT_LEAST_100)
        tab.expect("running").to_have_text("1")
        tab.expect("step-said").to_contain_text("median")
        tab.check_accessibility()
    is_idle(tab)
    tab.expect("blocks-cached").to_have_text(AT_LEAST_100)


def test_a_shared_beginning_is_shown_as_shared(open_tab: OpenTab, endless: ServerProcess) -> None:
    tab = open_tab(endless.url, "#engine")
    tab.expect("block-map").to_be_visible()
    prompt = "the same long beginning of both " * 20
    with asking(endless, prompt, max_tokens=15_000), asking(endless, prompt, max_tokens=14_999):
        tab.expect("request-row").to_have_count(2)
        tab.expect("blocks-shared").not_to_have_text("0")
    is_idle(tab)
    tab.expect("blocks-shared").to_have_text("0")


def test_who_waits_is_told_from_who_runs(open_tab: OpenTab, endless: ServerProcess) -> None:
    """Of five requests on four seats."""
    tab = open_tab(endless.url, "#engine")
    tab.expect("block-map").to_be_visible()
    with ExitStack() as all_of_them:
        for number in range(5):
            all_of_them.enter_context(asking(endless, f"number {number}", max_tokens=6000))
        tab.expect("running").to_have_text("4")
        tab.expect("waiting").to_have_text("1")
        assert tab.find("request-row").first.get_attribute("data-state") == "running"
        tab.expect(tab.page.locator("[data-test=request-row][data-state=waiting]")).to_have_count(1)
    is_idle(tab)


def test_keys_walk_through_the_blocks(open_tab: OpenTab, endless: ServerProcess) -> None:
    tab = open_tab(endless.url, "#engine")
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
def test_a_phone_shows_it_in_both_looks(open_tab: OpenTab, endless: ServerProcess, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    tab = open_tab(endless.url, "#engine", color_scheme=scheme, **phone)
    with asking(endless, "something to look at"):
        tab.expect("blocks-owned").to_have_text(AT_LEAST_100)
        tab.check_width()
        tab.check_accessibility()
