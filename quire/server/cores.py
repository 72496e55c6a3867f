"""The cores that this process may use, which torch does not ask: it counts the machine's."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = Path("/sys/fs/cgroup/cpu.max")  # "max" or microseconds, of so many microseconds


def usable_cores() -> int:
    """By this process's affinity, or its container's share where that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _SHARE.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return cores


def use_share() -> int | None:
    """Compute with as many threads as there are cores for them; what OMP_NUM_THREADS says goes before.

    More would wait for each other: the container's time is used up before the period is over. Returns the threads,
    where that changed something. For programs of our own: a library leaves torch's settings alone.
    """
    import torch

    cores = usable_cores()
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= cores:
        return None
    torch.set_num_threads(cores)
    return cores
