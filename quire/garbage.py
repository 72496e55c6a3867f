"""Python's collector of reference cycles, and when it had better wait."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_waits() -> Iterator[None]:
    """Around imports and the building of an engine: they leave next to nothing to collect, and to look through all that
    torch and transformers have in memory, again and again, takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # all that there is becomes old, unlooked at: else a step would pay for it
                gc.freeze()
                gc.unfreeze()
            gc.enable()
