"""GET / for browsers, and the files of the page that it shows: a playground, the engine live, its adapters.

The files lie in quire/server/page, built from page/ by `make page`. They ask for no key; what the page calls does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from quire.server.context import context_of
from quire.server.paths import PAGE_FILES, asks_for_page
from quire.server.responses.errors import ApiError
from quire.server.routes import info
from quire.server.runners import about

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# The page runs its own script and talks to its own server; pictures may come from the conversation itself.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked about: a new version shows at once
}

# In the place of the playground, which has nothing to show where nothing is generated.
_BARE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>quire</title><link rel="icon" href="page/icon.svg"></head>
<body><h1>quire</h1><p>This server {}.</p>
<p>The models that it has: <a href="v1/models">/v1/models</a>. All routes: <a href="openapi.json">/openapi.json</a>.</p>
</body></html>
"""


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    etag: str


@cache
def _file(name: str) -> _File:
    """One of the page's files. Raises OSError where the installation has lost it."""
    content = (FOLDER / name).read_bytes()
    kind = _TYPES.get(Path(name).suffix, "text/plain")
    return _File(content, f"{kind}; charset=utf-8", f'"{hashlib.sha256(content).hexdigest()[:32]}"')


@router.api_route("/", methods=["GET", "HEAD"])
async def root(request: Request) -> Response:
    """The page, for who asks for HTML; for others what this is, as JSON."""
    spec = context_of(request).engine.llm_engine.pooling
    answer: Response
    if not asks_for_page(request.scope):
        answer = await info.root()
    elif spec is not None:
        answer = Response(_BARE.format(about(spec)), media_type="text/html", headers=_HEADERS)
    else:
        return index(request)
    answer.headers["Vary"] = "Accept"
    return answer


def index(request: Request) -> Response:
    """The page."""
    answer = _answer(request, "index.html")
    answer.headers["Vary"] = "Accept"
    return answer


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def file(name: str, request: Request) -> Response:
    """One of the page's files."""
    if name not in PAGE_FILES:
        raise ApiError(404, f"the page has no file {name[:200]!r}.")
    return _answer(request, name)


class BareRoot(BaseRoute):
    """Leads from a root path without a slash at its end to the one with it, below which the page's URLs lie."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        bare = scope["type"] == "http" and scope["path"] == scope.get("root_path", "") != ""
        return (Match.FULL if bare and asks_for_page(scope) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await RedirectResponse(scope["path"].rpartition("/")[2] + "/", 307)(scope, receive, send)


def _answer(request: Request, name: str) -> Response:
    found = _file(name)
    headers = {**_HEADERS, "ETag": found.etag}
    given = request.headers.get("if-none-match", "")
    if found.etag in {tag.strip().removeprefix("W/") for tag in given.split(",")}:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)
