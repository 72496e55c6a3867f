"""Large blocks of the process's own memory, in huge pages where the system has them.

Weights and KV blocks are read all over, once a token: with pages of 4 KB, finding the pages takes as long as reading
them does, on a virtual machine above all.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import psutil
import torch

from quire.errors import QuireError

SIZE = 2 << 20  # bytes of a huge page, as most systems have them

_KEPT = 62 << 20

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later; Python's mmap has no name for it

# By address: what `allocate` has made.
_maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


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
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    _maps[tensor.data_ptr()] = pages
    return tensor


def populate(tensor: torch.Tensor, first: int, end: int) -> bool:
    """Have the system commit the pages of bytes `first` .. `end` of a tensor that `allocate` has made, as if each had
    been written to; what is in them stays. Any thread may call this, also while others write there.

    False: nothing was done, or not all: the system cannot, or has no memory left.
    """
    address = tensor.data_ptr()
    pages = _maps.get(address)
    if pages is None or sys.platform != "linux" or first >= end:
        return False
    begin = first // mmap.PAGESIZE * mmap.PAGESIZE
    size = min(end, len(pages)) - begin
    try:
        # Not by `pages.madvise`: a call of ctypes lets other threads run meanwhile, which takes milliseconds.
        madvise = ctypes.CDLL(None).madvise
        return bool(madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(size), _POPULATE_WRITE) == 0)
    except (OSError, AttributeError):
        return False


def keep_freed() -> None:
    """Have the C library keep up to 62 MB of what is freed for what is asked for next, in each arena of malloc's
    (threads may have their own).

    A step frees its tensors; where their pages go back to the system, the next step gets new ones, and zeroing them
    takes 2 to 5 % of the time of a step of a thousand tokens. The GNU library keeps twice the largest block that it has
    mapped and got back, of those up to 32 MB; others do as they please.
    """
    block = torch.empty(_KEPT // 2, dtype=torch.uint8)
    del block


def can_release(tensor: torch.Tensor) -> bool:
    """Whether `release` takes the memory that a tensor lies in."""
    return tensor.is_cuda or (hasattr(mmap, "MADV_DONTNEED") and tensor.untyped_storage().data_ptr() in _maps)


def release(tensor: torch.Tensor) -> Callable[[], None]:
    """Give the memory that a tensor lies in back to the system, and its contents with it.

    The function that is returned takes it again, for this tensor and whatever others lie in it; a CPU's stays at its
    address, a GPU's does not. Only where `can_release`.
    """
    storage = tensor.untyped_storage()
    if tensor.is_cuda:
        size = storage.nbytes()
        storage.resize_(0)
        return lambda: _resize(storage, size)
    _maps[storage.data_ptr()].madvise(mmap.MADV_DONTNEED)
    return lambda: None  # pages come as they are written


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    storage.resize_(size)


def available_bytes(device: torch.device | None = None) -> int:
    """Memory that this process may still take: a GPU's, or the machine's, or its container's where that is less."""
    if device is not None and device.type != "cpu":
        # What torch holds and does not use is free too.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    available: int = psutil.virtual_memory().available
    limit, used = _container("memory.max"), _container("memory.current")
    if limit and used:
        # What is cached of files counts as used, and goes when memory is needed: a checkpoint just fetched, above all.
        cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", _container("memory.stat"), re.MULTILINE)))
        available = min(available, max(int(limit) - int(used) + cached, 0))
    return available


def owner() -> str:
    """Whose memory `available_bytes` is: the same for all processes that have a part of it. A container with a limit
    has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = platform.node()
    return f"{boot} {platform.node()}" if _container("memory.max") else boot


def _container(name: str) -> str:
    """A file of this process's own cgroup (v2); empty where there is none, or no limit."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return ""
    return "" if text == "max" else text
