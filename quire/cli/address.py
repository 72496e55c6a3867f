"""Where a server is, as people say it."""

from __future__ import annotations

_PATH = "/v1"


def api_url(given: str) -> str:
    """What was given as a client has it: `localhost:8000` is http://localhost:8000/v1."""
    url = given.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    host = url.partition("://")[2]
    return url if "/" in host else url + _PATH
