"""What the commands share: two consoles, standard streams that can be used, and errors without tracebacks."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from quire.errors import QuireError

if TYPE_CHECKING:
    from rich.console import Console


INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended, as shells have it

# A model's text, and a server's, must not move the cursor or change the terminal's settings.
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")})


def console() -> Console:
    """For what was asked for: standard output."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def error_console() -> Console:
    """For what is said about it: standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: object) -> None:
    """One red line on standard error, if that can be written to."""
    with suppress(OSError):
        error_console().print(f"error: {' '.join(plain(str(message)).split())}", style="red", markup=False)


def plain(text: str) -> str:
    """Without what would command a terminal."""
    return text.translate(_CONTROL)


def write(text: str) -> None:
    """A piece of an answer, at once."""
    sys.stdout.write(plain(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A dim line on standard error for whoever sits there; nothing where that is no terminal."""
    if sys.stderr.isatty():
        error_console().print(plain(text), style="dim", markup=False)


@contextmanager
def ended_by(codes: Mapping[int, int]) -> Iterator[None]:
    """These signals end the program at once, with these exit codes: while modules are imported and a model is loaded.

    An exception instead would meet libraries in the middle of their imports, and some pass it over, or go on half made.
    A signal that is ignored, or has a handler already, keeps it.
    """
    ours = (signal.SIG_DFL, signal.default_int_handler)
    held = {}
    if threading.current_thread() is threading.main_thread():
        held = {number: signal.getsignal(number) for number in codes if signal.getsignal(number) in ours}
    for number in held:
        signal.signal(number, lambda number, frame: os._exit(codes[number]))
    try:
        yield
    finally:
        for number, before in held.items():
            signal.signal(number, before)


def ended_by_ctrl_c() -> AbstractContextManager[None]:
    """`ended_by` Ctrl-C alone."""
    return ended_by({signal.SIGINT: INTERRUPTED})


@contextmanager
def usable_streams() -> Iterator[None]:
    """Standard streams for a command: a closed one is /dev/null, and no character is too rare for the output.

    What goes wrong with them (a full disk, say) is one line and exit code 1, as is every other OSError; a reader
    that went away is not worth the line.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the program runs)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # not at the interpreter's end, where nothing can be made of an error
    except (OSError, UnicodeError) as error:
        _drop_output()
        if getattr(error, "errno", None) != errno.EPIPE:
            print_error(error)
        sys.exit(1)


def _drop_output() -> None:
    """Send what standard output still holds nowhere: the interpreter would fail on it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn what the user can mend into one line and exit code 1. Everything else keeps its traceback."""
    try:
        yield
    except QuireError as error:
        print_error(error)
        raise typer.Exit(1) from None
