"""A browser, and tabs of it, which fail a test if anything goes wrong in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.run import HOME, PACKAGES, missing
from tests.browser.servers import *  # noqa: F403
from tests.browser.tabs import PATIENCE, OpenTab, Tab, launch

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need the browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    if found := missing():
        pytest.skip("; ".join(found))
    sys.path.append(str(PACKAGES))
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as driver:
        driver.selectors.set_test_id_attribute("data-test")
        browser = launch(driver)
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Browser, request: pytest.FixtureRequest) -> Iterator[OpenTab]:
    """open_tab(url, **options of a browser's context): a tab with storage of its own, checked when the test ends.

    A test that fails leaves a picture of each of its tabs in .page/failures.
    """
    tabs: list[Tab] = []

    def open_it(url: str, path: str = "", **options: Any) -> Tab:
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        tabs.append(Tab(context.new_page(), url if url.endswith("/") else f"{url}/"))
        return tabs[-1].open(path)

    yield open_it
    failed = request.node.stash.get(_FAILED, False) or any(tab.faults for tab in tabs)
    for number, tab in enumerate(tabs):
        if failed:
            name = re.sub(r"\W+", "-", request.node.name)
            tab.picture(HOME / "failures" / f"{name}-{number}.png")
        tab.page.context.close()
    for tab in tabs:
        tab.check()
