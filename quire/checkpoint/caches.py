"""Where quire keeps what it has made of others' files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where quire keeps what it has made of others' files: $QUIRE_CACHE, or the user's cache."""
    chosen, users = os.environ.get("QUIRE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    return Path(users).expanduser() / "quire" if users else Path("~/.cache/quire").expanduser()
