"""What the machine can do: the roofs that `cpu.py` and `roofline.py` compare with."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quire.kernels import native

_BYTES = 1 << 28


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def processor() -> str:
    """What kind it is, as the system says: its name, family and model."""
    said: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            said.setdefault(name.strip(), value.strip())
    name = said.get("model name", platform.processor() or platform.machine())
    kind = [f"{part} {said[part]}" for part in ("cpu family", "model") if part in said]
    return ", ".join([name, *kind])


class Machine:
    """Best rates seen so far; measure again and again, as what else the machine does comes and goes."""

    def __init__(self) -> None:
        self._buffer = torch.ones(_BYTES // 4)
        self._rows, self._ones = self._buffer.view(-1, 1 << 12), torch.ones(1 << 12)
        self._operands = {dtype: torch.ones(2048, 2048, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
        self.read = 0.0  # bytes/s: the better of two of torch's reductions
        self.dense = 0.0  # FLOP/s: the best dense product, torch's or our own, float32 or bf16
        self.measure()

    def measure(self) -> float:
        """Look again. Returns the read rate of this moment."""
        reads = [self._buffer.sum, lambda: torch.mv(self._rows, self._ones)]
        now = max(_BYTES / seconds(read) for read in reads * 3)
        self.read = max(self.read, now)
        for a in self._operands.values():
            for product in (lambda a=a: a @ a, lambda a=a: native.linear(a, (a,), (None,))):
                self.dense = max(self.dense, 2 * 2048**3 / seconds(product))
        return now
