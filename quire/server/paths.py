"""Which route a request is for, as far as keys and the form of errors depend on it."""

from __future__ import annotations

from starlette.types import Scope

_ANTHROPIC = "/v1/messages"

# What lies under /page/ (routes/page.py) and may be had without a key.
PAGE_FILES = frozenset({"page.js", "page.css", "icon.svg", "licences.txt"})
_PAGE_PATHS = frozenset(f"/page/{name}" for name in PAGE_FILES)


def route_path(scope: Scope) -> str:
    """A path as the router sees it, or stricter: a root path of "/" makes //v1/... a route."""
    return "/" + str(scope["path"]).removeprefix(scope.get("root_path", "").rstrip("/")).strip("/")


def asks_for_page(scope: Scope) -> bool:
    """Whether a request is for the page or one of its files: / is the page for who asks for HTML, as browsers do."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    path = route_path(scope)
    if path != "/":
        return path in _PAGE_PATHS
    return any(name == b"accept" and b"text/html" in value.lower() for name, value in scope["headers"])


def speaks_anthropic(scope: Scope) -> bool:
    """Whether who asks expects answers as Anthropic's API has them, errors too."""
    path = route_path(scope)
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def given_keys(scope: Scope) -> list[bytes]:
    """The API keys that a request brings: `Authorization: Bearer KEY`, and Anthropic's `x-api-key: KEY`.

    Of each header the first counts; another scheme than Bearer brings an empty key, which nobody has.
    """
    keys: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name == b"authorization" and name not in keys:
            scheme, _, key = value.partition(b" ")
            keys[name] = key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key" and name not in keys:
            keys[name] = value.strip()
    return list(keys.values())
