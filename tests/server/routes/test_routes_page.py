"""The page at /: for whom, with which headers, with and without keys, under a root path, and without --page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.paths import PAGE_FILES
from quire.server.routes.page import FOLDER, POLICY
from tests.server.api_answers import error_of
from tests.server.api_server import LocalServer

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def keyed(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model)}, api_keys=("secret",), admin_api_key="boss") as server:
        yield server


def test_browsers_get_the_page_and_others_json(http: Any) -> None:
    page = http.get("/", headers=HTML)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (FOLDER / "index.html").read_bytes()
    told = http.get("/")
    assert told.json()["name"] == "quire"
    assert page.headers["vary"] == told.headers["vary"] == "Accept"


@pytest.mark.parametrize("name", ["", *sorted(PAGE_FILES)])
def test_every_file_has_its_headers(http: Any, name: str) -> None:
    path = f"/page/{name}" if name else "/"
    whole = http.get(path, headers=HTML)
    assert whole.status_code == 200 and whole.content == (FOLDER / (name or "index.html")).read_bytes()
    assert whole.headers["content-security-policy"] == POLICY
    assert whole.headers["x-content-type-options"] == "nosniff" and whole.headers["referrer-policy"] == "no-referrer"
    assert whole.headers["cache-control"] == "no-cache"
    head = http.head(path, headers=HTML)
    assert (head.status_code, head.content) == (200, b"")
    for field in ("content-length", "content-type", "etag", "content-security-policy"):
        assert head.headers[field] == whole.headers[field]
    etag = whole.headers["etag"]
    for given in (etag, f'"other", {etag}', f"W/{etag}"):
        same = http.get(path, headers={**HTML, "If-None-Match": given})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    assert http.get(path, headers={**HTML, "If-None-Match": '"other"'}).status_code == 200


def test_the_policy_lets_nothing_else_in() -> None:
    assert "unsafe" not in POLICY and "*" not in POLICY and "http" not in POLICY
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", index)
    named = re.findall(r'(?:src|href)="([^"]*)"', index)
    assert named and {name.removeprefix("page/") for name in named} <= PAGE_FILES  # relative: under any root path


def test_there_are_no_other_files(http: Any) -> None:
    for name in ("index.html", "stamp.txt", "nothing.js", "..%2fpaths.py", "%2e%2e", ".", "page.js%00", "page.js/"):
        assert http.get(f"/page/{name}").status_code == 404, name
    assert {path.name for path in FOLDER.iterdir()} == {"index.html", "stamp.txt", *PAGE_FILES}
    refused = http.post("/page/page.js")
    assert refused.status_code == 405 and error_of(refused)["type"] == "invalid_request_error"
    assert http.post("/", headers=HTML).status_code == 405


def test_the_files_need_no_key_and_nothing_else_is_open(keyed: LocalServer) -> None:
    with keyed.http() as http:
        for path in ("/", *(f"/page/{name}" for name in PAGE_FILES)):
            assert http.get(path, headers=HTML).status_code == http.head(path, headers=HTML).status_code == 200
            assert http.post(path, headers=HTML).status_code == 401
        assert http.get("/").status_code == 401
        for path in ("/page", "/page/", "/page/nothing", "/page/../v1/models", "/page/%2e%2e/v1/models", "/v1/models"):
            assert http.get(path, headers=HTML).status_code == 401, path
        assert http.get("/", headers={"Authorization": "Bearer secret"}).json()["name"] == "quire"


@pytest.mark.parametrize("root_path", ["/", "/quire", "/quire/", "/a/b"])
def test_under_a_root_path(plain_model: Path, root_path: str) -> None:
    """A proxy may take the prefix away or leave it."""
    serving = LocalServer({"model": str(plain_model)}, api_keys=("secret",), root_path=root_path)
    with serving as server, server.http() as http:
        for prefix in {"", root_path.rstrip("/")}:
            assert http.get(f"{prefix}/", headers=HTML).text.startswith("<!doctype html>"), prefix
            assert "javascript" in http.get(f"{prefix}/page/page.js").headers["content-type"], prefix
            assert http.get(f"{prefix}/v1/models", headers=HTML).status_code == 401, prefix
        if prefix := root_path.rstrip("/"):
            led = http.get(prefix, headers=HTML, follow_redirects=False)
            assert led.status_code == 307 and str(led.url.join(led.headers["location"])) == f"{server.url}{prefix}/"
            assert http.get(prefix).status_code == 401


def test_without_the_page(plain_model: Path) -> None:
    with LocalServer({"model": str(plain_model)}, page=False, api_keys=("secret",)) as server, server.http() as http:
        for path in ("/", "/page/page.js"):
            assert http.get(path, headers=HTML).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert http.get("/", headers={**HTML, **key}).json()["name"] == "quire"
        missing = http.get("/page/page.js", headers=key)
        assert missing.status_code == 404 and error_of(missing)["type"] == "not_found_error"
