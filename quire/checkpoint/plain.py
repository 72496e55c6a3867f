"""Plain files, and nothing else that has a name."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file for reading. Raises OSError for anything else: a pipe would be waited for without end."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError("it is no plain file")
    return open(number, "rb")
