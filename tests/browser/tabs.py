"""A tab of the browser that remembers all that went wrong in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.browser.run import AXE, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, Playwright, Request

PATIENCE = 1000 * int(os.environ.get("QUIRE_PATIENCE", 60))  # milliseconds, on a machine that does much else
SERIOUS = ("serious", "critical")


def launch(driver: Playwright) -> Browser:
    """In a sandbox, unless it is root's, who can have none, or the system lets nobody have one, as some containers and
    Ubuntu with a Chromium of its own do. The pages are our own."""
    from playwright.sync_api import Error

    if os.geteuid() != 0:
        with suppress(Error):
            return driver.chromium.launch(executable_path=chromium(), chromium_sandbox=True)
    return driver.chromium.launch(executable_path=chromium(), chromium_sandbox=False)


class Tab:
    """A page, its faults, and what it asked for.

    A fault is an error or a warning in the console, an exception that nobody catches, a page that crashed, a dialog, or
    a request to another origin than the page's own. Those that `expect_fault` names are none, but they must come.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self._expected: dict[str, bool] = {}
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._note(f"exception: {error}"))
        page.on("crash", lambda _: self._note("the page crashed"))
        page.on("dialog", self._on_dialog)
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self._note(f"console: {message.type}: {message.text} ({message.location.get('url', '')})")

    def _on_dialog(self, dialog: Dialog) -> None:
        self._note(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Request) -> None:
        asked, own = urlsplit(request.url), urlsplit(self.url)
        if asked.scheme not in ("data", "blob", "about") and (asked.scheme, asked.netloc) != (own.scheme, own.netloc):
            self._note(f"a request to another origin: {request.url}")

    def _note(self, fault: str) -> None:
        matching = [pattern for pattern in self._expected if re.search(pattern, fault)]
        self._expected.update(dict.fromkeys(matching, True))
        if not matching:
            self.faults.append(fault)

    def expect_fault(self, pattern: str) -> None:
        """From now on, a fault that this matches is meant to come: the browser notes each answer of 401 as an error."""
        self._expected[pattern] = False

    def check(self) -> None:
        """Fail if anything went wrong, or if what was expected to did not."""
        assert not self.faults, "\n".join(["faults in the page:", *self.faults])
        absent = [pattern for pattern, came in self._expected.items() if not came]
        assert not absent, f"faults that were expected and did not come: {absent}"

    def open(self, path: str = "") -> Tab:
        """Go to a path below the page's address: "#engine"."""
        self.page.goto(self.url + path)
        return self

    def find(self, name: str, **options: Any) -> Locator:
        """All elements whose data-test attribute is this, the visible and the others."""
        return self.page.get_by_test_id(name, **options)

    def expect(self, what: str | Locator) -> Any:
        """What is to become true of an element, by its data-test attribute: `tab.expect("banner").to_be_visible()`."""
        from playwright.sync_api import expect  # which the tests' own set-up installs

        return expect(self.find(what) if isinstance(what, str) else what)

    def knows_its_model(self, name: str) -> None:
        """Wait until the page's head names the model that is served."""
        self.expect(self.page.locator(".served")).to_contain_text(name)

    def give_key(self, key: str) -> None:
        """Into the dialog that asks for it."""
        self.find("key").fill(key)
        self.find("key-save").click()

    def accessibility_faults(self) -> list[str]:
        """What axe-core calls serious or critical in the page as it is now."""
        self.page.evaluate(AXE.read_text())
        rules = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
        found = self.page.evaluate("rules => axe.run(document, {runOnly: rules})", rules)
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {json.dumps([node['html'] for node in one['nodes']])}"
            for one in found["violations"]
            if one["impact"] in SERIOUS
        ]

    def check_accessibility(self) -> None:
        found = self.accessibility_faults()
        assert not found, "\n".join(found)

    def check_width(self) -> None:
        """Nothing makes the page itself wider than the window."""
        wide, window = self.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= window, f"the page is {wide} pixels wide, and the window {window}"

    def settle(self) -> None:
        """Wait until what was asked for has come and is drawn. Not where a stream is open."""
        self.page.wait_for_load_state("networkidle")
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)


OpenTab = Callable[..., Tab]  # see conftest.py
