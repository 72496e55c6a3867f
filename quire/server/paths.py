"""Which route a request is for, as far as keys and the form of errors depend on it."""

from __future__ import annotations

from starlette.types import Scope

_ANTHROPIC = "/v1/messages"


def route_path(scope: Scope) -> str:
    """A path as the router sees it, or stricter: a root path of "/" makes //v1/... a route."""
    return "/" + str(scope["path"]).removeprefix(scope.get("root_path", "").rstrip("/")).strip("/")


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
