"""The priority of threads that read adapters."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def lower_priority() -> None:
    """Let this thread, and those that it begins, wait for the threads that compute steps: Linux has it by thread."""
    if sys.platform != "linux":  # elsewhere this would be the whole process
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
