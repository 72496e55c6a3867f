"""Keys, and a path before the page's own."""

from __future__ import annotations

from tests.browser.proxy import PathProxy
from tests.browser.servers import ADMIN_KEY, KEY
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import ServerProcess

REFUSED = "status of 401"  # the browser's own word on an answer


def test_a_key_is_asked_for_until_it_is_the_right_one(open_tab: OpenTab, keyed: ServerProcess) -> None:
    tab = open_tab(keyed.url)
    tab.expect_fault(REFUSED)
    for wrong in ("", "a-wrong-key", "kéÿ ключ"):
        tab.find("key").wait_for()
        tab.give_key(wrong)
    tab.find("key").wait_for()
    tab.check_accessibility()
    tab.give_key(KEY)
    tab.knows_its_model("quire-demo")
    tab.find("key").wait_for(state="hidden")


def test_a_key_lives_as_long_as_was_said(open_tab: OpenTab, keyed: ServerProcess) -> None:
    """In the tab; or in the browser, where that was asked for."""
    tab = open_tab(keyed.url)
    tab.expect_fault(REFUSED)
    tab.give_key(KEY)
    tab.knows_its_model("quire-demo")
    tab.page.reload()
    tab.knows_its_model("quire-demo")
    second = Tab(tab.page.context.new_page(), tab.url).open()
    second.expect_fault(REFUSED)
    second.page.get_by_role("checkbox", name="Remember").check()
    second.give_key(ADMIN_KEY)
    second.knows_its_model("quire-demo")
    third = Tab(tab.page.context.new_page(), tab.url).open()
    third.knows_its_model("quire-demo")
    for one in (second, third):
        one.check()


def test_the_page_works_under_a_path(open_tab: OpenTab, proxy: PathProxy) -> None:
    """`proxy` tells of each request that leaves it."""
    for view in ("chat", "engine", "adapters"):
        tab = open_tab(proxy.url, f"#{view}")
        tab.expect_fault(REFUSED)
        tab.give_key(KEY)
        tab.knows_its_model("quire-demo")
