"""`quire top`: a server's engine, live, on the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.options import SERVER, Address, Key, Url, one_of
from quire.cli.terminal import INTERRUPTED, errors_in_one_line


def top(
    address: Address = None,
    url: Url = None,
    api_key: Key = None,
    rate: Annotated[float, typer.Option(min=0.2, max=10, help="Pictures a second, at most.")] = 2,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and end.")] = False,
) -> None:
    """Watch a server's engine at work.

    The map of KV blocks, who runs and who waits, the last steps, adapters and
    where they are. c colours blocks by request or by adapter, p pauses, q
    leaves. Where the output is no terminal, --once is meant.
    """
    with errors_in_one_line():
        place = one_of("URL", address, "--url", url) or SERVER
        try:
            _begin(place, api_key, rate, once)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _begin(place: str, key: str | None, rate: float, once: bool) -> None:
    from quire.cli.top_live import Top, can_be_drawn_on

    top = Top(place, key, rate)
    if once or not can_be_drawn_on():
        top.print()
    else:
        top.hold()
