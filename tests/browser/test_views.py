"""Each view in each look: it opens without a fault, a screen reader can make sense of it, and nothing is too wide."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.tabs import OpenTab
from tests.server.api_server import ServerProcess

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True},
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(("view", "heading"), [("chat", "Playground"), ("engine", "Engine"), ("adapters", "Adapters")])
def test_a_view_opens_without_a_fault(
    open_tab: OpenTab, demo: ServerProcess, view: str, heading: str, look: str
) -> None:
    tab = open_tab(demo.url, f"#{view}", **LOOKS[look])
    tab.knows_its_model("quire-demo")
    assert heading in tab.page.title()
    tab.check_accessibility()
    tab.check_width()


def test_a_view_is_chosen_by_its_link_and_by_the_way_back(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    for view in ("view-engine", "view-adapters"):
        tab.find(view).click()
        tab.expect(view).to_have_attribute("aria-current", "page")
    tab.page.go_back()
    tab.expect("view-engine").to_have_attribute("aria-current", "page")


def test_colours_follow_the_system_or_the_switch(open_tab: OpenTab, demo: ServerProcess) -> None:
    """And the choice is kept."""
    tab = open_tab(demo.url, color_scheme="dark")
    assert brightness(tab) < 80
    switch = tab.page.get_by_role("button", name="Colours")
    switch.click()
    assert brightness(tab) > 175
    tab.page.reload()
    assert brightness(tab) > 175
    switch.click()
    assert brightness(tab) < 80
    tab.page.emulate_media(color_scheme="light")
    assert brightness(tab) < 80  # dark was chosen
    switch.click()
    assert brightness(tab) > 175  # as the system has it, again


def brightness(tab: Any) -> float:
    """Of the page's ground, 0 to 255."""
    colour = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).map(Number)"
    red, green, blue = tab.page.evaluate(colour)
    return float(0.3 * red + 0.59 * green + 0.11 * blue)
