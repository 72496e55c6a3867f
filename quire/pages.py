"""Large blocks of the process's own memory, in huge pages where the system has them.

Weights and KV blocks are read all over, once a token: with pages of 4 KB, finding the pages takes as long as reading
them does, on a virtual machine above all.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path

import psutil
import torch

from quire.errors import QuireError


def allocate(size: int) -> torch.Tensor:
    """Return `size` bytes [size] uint8 of zeros, committed page by page as they are first written.

    Raises QuireError where the system refuses.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise QuireError(
            f"the system does not give {size:,} bytes of memory ({error}): lower kv_cache_memory_bytes or "
            "gpu_memory_utilization, or take a smaller model."
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def available_bytes(device: torch.device | None = None) -> int:
    """Memory that this process may still take: a GPU's, or the machine's, or its container's where that is less."""
    if device is not None and device.type != "cpu":
        # What torch holds and does not use is free too.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    available = psutil.virtual_memory().available
    limit, used = _container("memory.max"), _container("memory.current")
    if limit and used:
        # What is cached of files counts as used, and goes when memory is needed: a checkpoint just fetched, above all.
        cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", _container("memory.stat"), re.MULTILINE)))
        available = min(available, max(int(limit) - int(used) + cached, 0))
    return available


def _container(name: str) -> str:
    """A file of this process's own cgroup (v2); empty where there is none, or no limit."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return ""
    return "" if text == "max" else text
