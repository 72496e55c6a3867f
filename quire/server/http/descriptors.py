"""How many connections there may be, as each takes one of the process's descriptors."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("quire.server")

SPARE = 32  # connections beyond the limit: for probes, and to tell others that there is no room
_FILES = 48  # descriptors for everything else: adapters, images, the sandbox of templates
_FEWEST = 8  # connections, whatever the limit of descriptors


def room_for(most: int) -> int:
    """So many connections, or as many as the process may have descriptors for; raises that limit where it can."""
    try:
        import resource
    except ImportError:  # not on this system
        return most
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 2 * _FILES
    wanted = most + SPARE + used + _FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most
    room = max(_FEWEST, soft - SPARE - used - _FILES)
    logger.warning("%d connections at most, not %d: the limit of open files is %d (ulimit -n)", room, most, soft)
    return room
