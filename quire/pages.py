"""Large blocks of the process's own memory, in huge pages where the system has them.

Weights and KV blocks are read all over, once a token: with pages of 4 KB, finding the pages takes as long as reading
them does, on a virtual machine above all.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import psutil
import torch


def allocate(size: int) -> torch.Tensor:
    """Return `size` bytes [size] uint8 of zeros, committed page by page as they are first written."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its container's where that is less."""
    available = psutil.virtual_memory().available
    limit, used = _read_number("memory.max"), _read_number("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _read_number(name: str) -> int | None:
    """A number of this process's own cgroup (v2); None where there is no such limit."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None
