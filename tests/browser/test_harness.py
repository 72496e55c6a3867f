"""The tests' own tools: what goes wrong in a page is seen, and the proxy is one."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import run
from tests.browser.proxy import PathProxy
from tests.browser.tabs import OpenTab, Tab

PAGES = {
    "/": "<p>nothing wrong</p>",
    "/error": "<script>console.error('a wrong thing')</script>",
    "/warning": "<script>console.warn('a doubtful thing')</script>",
    "/exception": "<script>throw new Error('nobody catches this')</script>",
    "/rejection": "<script>Promise.reject(new Error('nor this'))</script>",
    "/dialog": "<script>alert('a dialog')</script>",
    "/missing": "<img src='absent.png' alt='absent'>",
    "/elsewhere": "<img src='http://localhost:1/x.png' alt='from elsewhere'>",
    "/bad": "<button></button><img src='data:,'>",
    "/good": "<main><h1>A page</h1><button>Send</button></main>",
}


class Pages(BaseHTTPRequestHandler):
    """The pages above."""

    def do_GET(self) -> None:
        body = PAGES.get(self.path, "").encode()
        text = b"<!doctype html><html lang=en><head><title>t</title><link rel=icon href='data:,'></head>" + body
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *what: object) -> None:
        pass


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("error", "console: error: a wrong thing"),
        ("warning", "console: warning: a doubtful thing"),
        ("exception", "exception: .*nobody catches this"),
        ("rejection", "exception: .*nor this"),
        ("dialog", "a dialog: a dialog"),
        ("missing", "status of 404"),
        ("elsewhere", "another origin: http://localhost:1/x.png"),
    ],
)
def test_what_goes_wrong_is_a_fault_unless_it_is_expected(open_tab: OpenTab, pages: str, name: str, fault: str) -> None:
    tab = open_tab(pages)
    tab.expect_fault(fault)
    if name == "elsewhere":
        tab.expect_fault("ERR_")  # nobody listens there, or the browser does not ask
    with pytest.raises(AssertionError, match="did not come"):
        tab.check()
    tab.open(name)
    until_clean(tab)
    tab.expect_fault("an earlier one does not count")
    with pytest.raises(AssertionError, match="an earlier one"):
        tab.check()
    tab._expected.clear()  # as if nothing had been expected
    tab.page.reload()
    with pytest.raises(AssertionError, match=fault):
        until_clean(tab)
    tab.faults.clear()


def until_clean(tab: Tab) -> None:
    """What the page did has been told when the browser answers a question after the last load."""
    tab.settle()
    tab.check()


def test_a_page_without_faults_has_none(open_tab: OpenTab, pages: str) -> None:
    tab = open_tab(pages)
    until_clean(tab)


def test_serious_faults_of_accessibility_are_found(open_tab: OpenTab, pages: str) -> None:
    found = "\n".join(open_tab(pages, "bad").accessibility_faults())
    assert "button-name (critical)" in found and "image-alt (critical)" in found
    open_tab(pages, "good").check_accessibility()


def test_what_takes_too_long_is_ended_with_all_its_children() -> None:
    """The end of a pipe that they hold comes when none of them is left."""
    read, write = os.pipe()
    with open(read, "rb") as told:
        with open(write, "wb") as held, pytest.raises(subprocess.TimeoutExpired):
            run.finish(["sh", "-c", "sleep 1000 & sleep 1000"], 1, stdout=held)
        assert told.read() == b""


def test_what_cannot_be_had_leaves_the_tests_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the reason: a browser that only says where one could be had, and registries that do not answer."""
    for name, code in (("chromium", 1), ("apt-get", 100), ("npm", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(run, "HOME", tmp_path / "new")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert run.main() == 0
    told = capfd.readouterr().err
    assert "are left out. Missing:\n" in told and "failed with code" in told


def test_the_proxy_takes_its_path_away(open_tab: OpenTab, pages: str) -> None:
    with PathProxy(pages, "/under/here") as proxy:
        tab = open_tab(proxy.url, "good")
        assert tab.page.get_by_role("button").inner_text() == "Send"
        tab.expect_fault("status of 404")
        assert tab.page.evaluate("fetch('/good').then(answer => answer.status)") == 404
        assert proxy.outside == ["/good"]
