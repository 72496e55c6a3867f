"""Dialogs take the keys from the moment that they are asked for."""

from __future__ import annotations

import pytest

from tests.browser.playground import Playground, turn
from tests.browser.proxy import PathProxy
from tests.browser.servers import KEY
from tests.browser.tabs import OpenTab
from tests.server.api_server import ServerProcess

# Before the next frame is drawn, keys come already.
OPEN_AT_ONCE = """async button => {
    button.focus();
    button.click();
    await new Promise(done => setTimeout(done));
    return document.querySelector("dialog.code")?.open ?? false;
}"""


@pytest.mark.parametrize("how", ["as-curl", "as-python"])
def test_code_is_closed_by_escape(open_tab: OpenTab, demo: ServerProcess, how: str) -> None:
    tab = open_tab(demo.url)
    tab.find("prompt").wait_for()
    Playground(tab).take_in({"turns": [turn("hello", "hi")], "columns": [{"id": "c"}]})
    for _ in range(2):
        assert tab.find(how).evaluate(OPEN_AT_ONCE)
        tab.page.keyboard.press("Escape")
        tab.expect("code").to_have_count(0)
        tab.expect(tab.find(how)).to_be_focused()


def test_a_key_is_not_given_by_escape(open_tab: OpenTab, proxy: PathProxy) -> None:
    """The page stays without one, and asks again when one is needed."""
    tab = open_tab(proxy.url)
    tab.expect_fault("status of 401")
    tab.expect("key").to_be_visible()
    tab.page.keyboard.press("Escape")
    tab.expect("key").to_be_hidden()
    Playground(tab).send("hello")
    tab.expect("key").to_be_visible()
    tab.page.keyboard.press("Escape")
    tab.expect("key").to_be_hidden()
    tab.find("retry").click()
    tab.give_key(KEY)
    tab.expect("key").to_be_hidden()
