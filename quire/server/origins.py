"""Whether a web page that nobody asked for sends this. Browsers tell who sends, and whom they think they ask."""

from __future__ import annotations

import re
from ipaddress import ip_address

from fastapi import Request

from quire.config import ServerConfig
from quire.server.responses.errors import ApiError

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")  # a header's: the name or address, and perhaps a port


def check_origin(request: Request, config: ServerConfig) -> None:
    """Raise ApiError for a web page of another site. For routes that change what the server has.

    Browsers send forms anywhere without asking (bodies of JSON they do not), so that any page could change adapters on
    its visitor's machine. And who answers for a page's own name may let it stand for 127.0.0.1 (DNS rebinding): to the
    browser the server is that page's own site then. Where there are keys, neither knows one.
    """
    origin, site, host = (request.headers.get(name) for name in ("origin", "sec-fetch-site", "host"))
    if config.api_keys or config.admin_api_key or {"*", origin} & set(config.allowed_origins):
        return
    same = site in ("same-origin", "none")
    if site is None:  # not a browser, or one that came without TLS over a network
        same = origin is None or origin.partition("://")[2] == host
    if not same:
        raise ApiError(403, "a web page of another site sent this: --allowed-origins names those that may.")
    if (origin is None and site is None) or not _for_this_machine_alone(config) or _is_ours(host or "", config):
        return
    raise ApiError(
        403,
        f"a web page sent this to {(host or '')[:200]!r}, and this server listens on {config.host} alone. If a proxy "
        "has that name, name the page's origin (--allowed-origins), or give the server a key (--api-key).",
    )


def _for_this_machine_alone(config: ServerConfig) -> bool:
    """Whether only this machine's browsers reach it, and no proxy is known to be between."""
    return config.uds is None and not config.root_path.rstrip("/") and _is_loopback(config.host)


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _is_ours(host: str, config: ServerConfig) -> bool:
    """Whether a Host header names this machine, as no name does that a stranger's DNS answers for."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].lower().rstrip(".")
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return _is_loopback(name) or name == config.host.lower()
    return True  # an address: nobody's DNS was asked
