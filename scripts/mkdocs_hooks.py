"""Hooks of mkdocs: pages of the repository's root on the site, and links that leave docs/ led to the repository.

Pages are written for GitHub, where links are relative to the file. On the site, a link to a page leads to that page,
one to another file of the repository to where it lies on the web (`repo_url`), one that leads to no file is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Files of the root that are pages, and their names on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
BRANCH = "main"

_FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|/")  # https:, mailto:


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    sources = {page: name for name, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        target = match["target"]
        if _ELSEWHERE.match(target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return f"{match['before']}{place(path, source, page.file.src_uri, config)}{match['anchor'] or ''}"

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(lead, part) for part in parts[::2]]
    return "".join(parts)


def place(path: str, source: str, uri: str, config: MkDocsConfig) -> str:
    """Where a file of the repository is on the site, as seen from the page `uri`."""
    if not (ROOT / path).exists():
        raise PluginError(f"{source}: a link leads to {path}, which is not there")
    if path in PAGES:
        return posixpath.relpath(PAGES[path], posixpath.dirname(uri) or ".")
    if path.startswith("docs/"):
        return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(uri) or ".")
    assert config.repo_url is not None
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.repo_url.rstrip('/')}/{kind}/{BRANCH}/{path}"
