"""Paths that clients name, held to the folders that the operator has named."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path

_MOST_LINKS = 40  # Linux's own limit


class KernelPathError(ValueError):
    """The path leads through the kernel's own links, as in /proc/self/root."""


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path with its links followed, as Path.resolve does; what is not there may stand behind it.

    Raises KernelPathError for one that leads through /proc, itself or by a link (/dev/fd): such links lead where their
    text does not say, into other processes' files, too. Raises OSError where links go round in circles, ValueError for
    what can be no path.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise ValueError("a null character")
    if os.sep != "/":
        return Path(path).resolve()
    rest, here, links = os.path.join(os.getcwd(), text).split("/")[::-1], "/", 0
    while rest:
        part = rest.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        here = os.path.join(here, part)
        if _is_kernels(here):
            raise KernelPathError("it leads through the kernel's own links")
        try:
            target = os.readlink(here)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
            continue  # no link, or not there
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        rest += target.split("/")[::-1]
        here = "/" if target.startswith("/") else os.path.dirname(here)
    return Path(here)


def open_beneath(path: Path, root: Path) -> int:
    """Open a file for reading, by a resolved path that lies under `root`, and return its descriptor.

    Raises OSError, for a link as well: one that has come since the path was resolved is not followed. Does not wait at
    a pipe.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if os.open not in os.supports_dir_fd:
        return os.open(path, flags)
    flags |= os.O_NOFOLLOW
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    *folders, name = path.relative_to(root).parts or (".",)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)


def _is_kernels(path: str) -> bool:
    if path == "/proc":
        return True
    try:
        return os.lstat(path).st_dev == _proc()
    except (OSError, ValueError):
        return False


@cache
def _proc() -> int:
    """The device number of the file system at /proc; -1 where there is none."""
    try:
        return os.stat("/proc").st_dev if os.path.ismount("/proc") else -1
    except OSError:
        return -1
