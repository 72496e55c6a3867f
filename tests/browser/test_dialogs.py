"""Dialogs, and what asks in their stead: they say what they are, hold the focus, and give it back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.playground import Playground
from tests.browser.proxy import PathProxy
from tests.browser.servers import KEY
from tests.browser.tabs import OpenTab, Tab
from tests.browser.test_views import LOOKS
from tests.server.api_server import ServerProcess

STAR = "There is a green star and a black triangle. What color is the star?"
FOCUSED = "document.activeElement.closest('dialog') !== null"


def keeps_the_focus(tab: Tab) -> None:
    """Tab goes around in the dialog, or to the browser's own controls, and never to what lies below."""
    for _ in range(8):
        tab.page.keyboard.press("Tab")
        assert tab.page.evaluate(f"document.activeElement === document.body || {FOCUSED}")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("how", ["curl", "python"])
def test_code_is_shown_in_a_dialog(open_tab: OpenTab, demo: ServerProcess, how: str, look: str) -> None:
    tab = open_tab(demo.url, **LOOKS[look])
    chat = Playground(tab)
    chat.take_in({"turns": [{"text": STAR, "answers": {"c": {"model": "shout", "text": "GREEN.", "finish": "stop"}}}],
                  "columns": [{"id": "c", "model": "shout"}], "options": {"seed": 7}})  # fmt: skip
    if look == "phone":
        tab.page.get_by_role("button", name="Close the list").click()
    opener = tab.find(f"as-{how}")
    opener.click()
    tab.expect("code").to_be_visible()
    tab.expect("code-text").to_have_value(re.compile("curl http" if how == "curl" else "OpenAI"))
    tab.expect("code-text").to_have_value(re.compile(re.escape(STAR)))
    tab.check_accessibility()
    tab.check_width()
    keeps_the_focus(tab)
    tab.page.keyboard.press("Escape")
    tab.expect("code").to_have_count(0)
    tab.expect(opener).to_be_focused()
    opener.click()
    tab.page.get_by_role("button", name="Close", exact=True).click()
    tab.expect("code").to_have_count(0)


def test_code_is_copied(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url, permissions=["clipboard-read", "clipboard-write"])
    chat = Playground(tab, temperature=0, system="Be short.")
    chat.ask(STAR)
    tab.find("as-curl").click()
    tab.find("copy").click()
    tab.expect(tab.page.get_by_role("status").filter(has_text="Copied.")).to_be_visible()
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == tab.find("code-text").input_value()
    assert json.dumps("Be short.") in copied and demo.url in copied


@pytest.mark.parametrize("look", LOOKS)
def test_the_key_is_asked_for_in_a_dialog(open_tab: OpenTab, proxy: PathProxy, look: str) -> None:
    tab = open_tab(proxy.url, **LOOKS[look])
    tab.expect_fault("status of 401")
    tab.find("key").wait_for()
    tab.expect(tab.page.get_by_role("dialog", name="A key, please")).to_be_visible()
    tab.check_accessibility()
    tab.check_width()
    keeps_the_focus(tab)
    tab.page.get_by_role("button", name="Not now").click()
    tab.expect("key").not_to_be_visible()
    tab.check_accessibility()
    tab.page.reload()
    tab.find("key").wait_for()
    tab.give_key(KEY)
    tab.knows_its_model("quire-demo")


@pytest.mark.parametrize("look", LOOKS)
def test_what_asks_before_it_acts(open_tab: OpenTab, demo: ServerProcess, look: str) -> None:
    """Unloading asks in its row: the answer that does it has the focus, and there is a way back."""
    tab = open_tab(demo.url, "#adapters", **LOOKS[look])
    shown = tab.page.locator("[data-test=adapter-row][data-name=shout]")
    shown.get_by_test_id("unload").click()
    tab.expect(shown.get_by_test_id("unload-sure")).to_be_focused()
    tab.check_accessibility()
    tab.check_width()
    shown.get_by_role("button", name="Keep it").click()
    tab.expect(shown.get_by_test_id("unload")).to_be_visible()


@pytest.mark.parametrize("look", LOOKS)
def test_what_opens_in_a_view(open_tab: OpenTab, demo: ServerProcess, look: str) -> None:
    """The list with a name that is being written, all options, an adapter's report, sliders."""
    options: dict[str, Any] = LOOKS[look]
    tab = open_tab(demo.url, **options)
    chat = Playground(tab)
    chat.take_in({"turns": [{"text": "Hello"}], "title": "One of two"})
    tab.find("rename").first.click()
    tab.expect(tab.page.get_by_label("Name of the conversation")).to_be_focused()
    tab.check_accessibility()
    tab.page.keyboard.press("Escape")
    tab.expect(tab.page.get_by_label("Name of the conversation")).to_have_count(0)
    tab.page.reload()
    chat.option("schema", "{")
    chat.option("tools", "[")
    tab.check_accessibility()
    tab.page.goto(f"{tab.url}#adapters")
    tab.find("adapter-row").first.get_by_text("What was bound").click()
    tab.check_accessibility()
    tab.check_width()
