"""What the commands share: two consoles, and errors without tracebacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from quire.errors import QuireError

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """For what was asked for: standard output."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def error_console() -> Console:
    """For what is said about it: standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: object) -> None:
    """One red line on standard error."""
    error_console().print(f"error: {' '.join(str(message).split())}", style="red", markup=False)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn what the user can mend into one line and exit code 1. Everything else keeps its traceback."""
    try:
        yield
    except QuireError as error:
        print_error(error)
        raise typer.Exit(1) from None
