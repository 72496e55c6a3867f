"""A GPU's clock and roofs, and how `gpu.py` reports figures."""

from __future__ import annotations

import json
import math
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType

import torch

_LEAST = 2e-3  # seconds that are timed at once, at least: starting the work is no part of it then
_AHEAD = 500_000  # cycles that the GPU waits while the work to be timed is queued
_LONG = 0.2  # seconds after which a call is not repeated within one time

Run = Callable[[], object]


class TimeIsUp(Exception):
    """Another figure is not begun."""


@dataclass
class Report:
    """Prints one line a figure, and keeps it as a line of JSON in `file`."""

    case: str
    file: Path | None = None
    failures: int = 0

    def show(
        self,
        what: str,
        values: Sequence[float],
        unit: str = "",
        target: float | None = None,
        at_most: bool = False,
        more: Mapping[str, float | str] = MappingProxyType({}),
    ) -> bool:
        """The median of `values` and their range, beside the target: a least value, or the most. Returns if it is met.

        more: what else belongs to the figure, printed behind it.
        """
        middle = median(values)
        met = target is None or (middle <= target if at_most else middle >= target)
        spread = f"({min(values):.4g} - {max(values):.4g})" if len(values) > 1 else ""
        goal = "" if target is None else f"{'<=' if at_most else '>='} {target:g}  {'met' if met else 'missed'}"
        texts = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in more.items()}
        rest = "  ".join(f"{name} {text}" for name, text in texts.items())
        line = f"{self.case:9} {what:46} {middle:9.4g} {unit:8} {spread:21} {goal:15} {rest}"
        print(line.rstrip(), flush=True)
        if self.file is not None:
            figure = {"case": self.case, "name": what, "value": middle, "low": min(values), "high": max(values)}
            figure |= {"unit": unit, "target": target, "met": None if target is None else met, **more}
            with self.file.open("a") as lines:
                lines.write(json.dumps(figure) + "\n")
        return met

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What goes wrong inside is printed, and the next figure may come."""
        try:
            yield
        except TimeIsUp:
            print(f"{self.case:9} {what}: left out, time is up", flush=True)
        except Exception as error:
            self.failures += 1
            traceback.print_exc()
            print(f"{self.case:9} {what}: failed: {type(error).__name__}: {error}", flush=True)


@dataclass(frozen=True)
class Roofs:
    """What the device was seen to do in a second: bytes read and written by a copy, bytes read by a sum, bf16 FLOPs."""

    copy: float
    read: float
    matrix: float

    def seconds(self, flops: float, size: float) -> float:
        """That nothing of so many operations and bytes can beat."""
        return max(flops / self.matrix, size / self.copy)


@dataclass
class Bench:
    """What all cases share.

    rounds: values behind each median. quick: fewer sizes. deadline: of time.monotonic(); no round begins after it.
    """

    device: torch.device
    report: Report
    rounds: int = 3
    quick: bool = False
    deadline: float = math.inf
    roofs: Roofs = field(default_factory=lambda: Roofs(1.0, 1.0, 1.0))

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def check_time(self) -> None:
        """Raise TimeIsUp where it is."""
        if self.late:
            raise TimeIsUp

    def turns(self, count: int | None = None) -> Iterator[int]:
        """The numbers of so many rounds: one at least, and no more once time is up."""
        for turn in range(self.rounds if count is None else count):
            if turn and self.late:
                return
            yield turn

    def clock(self, sides: Mapping[str, tuple[Callable[[int], object], int]]) -> dict[str, list[float]]:
        """Seconds of a call of each side: sides (call, so many of them) take turns, `clock` rounds.

        A call gets its number, to choose its operands by: all of them together should be more than caches hold.
        """
        ready = {name: (prepared(call, count, self.device), count) for name, (call, count) in sides.items()}
        loops: dict[str, int] = {}
        spent: dict[str, list[float]] = {name: [] for name in ready}
        for name, (run, _) in ready.items():
            once = seconds(run, self.device)
            loops[name] = 1 if once > _LONG else max(1, min(100, math.ceil(_LEAST / max(once, 1e-6))))
        for _ in self.turns(4 * self.rounds if self.device.type == "cuda" else None):
            for name, (run, count) in ready.items():
                spent[name].append(seconds(run, self.device, loops[name]) / loops[name] / count)
        return spent


def prepared(call: Callable[[int], object], count: int, device: torch.device) -> Run:
    """What makes `count` calls; on a GPU by one CUDA graph, so that Python's time between them does not count."""

    def run() -> None:
        for number in range(count):
            call(number)

    run()  # compiles, loads and allocates what is missing
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"  no CUDA graph ({str(error).splitlines()[0]}): calls are timed with Python between them", flush=True)
        torch.cuda.synchronize(device)
        return run
    return graph.replay


def seconds(run: Run, device: torch.device, loops: int = 1) -> float:
    """That the device is at `loops` runs."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(loops):
            run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_AHEAD)
    start.record()
    for _ in range(loops):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def rates(device: torch.device, size: int = 2 << 30, side: int = 8192, repeats: int = 15) -> dict[str, list[float]]:
    """By roof, what each of the repeats has seen. size: bytes that are copied; side: of the square matrices."""
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    work: dict[str, tuple[Run, float]] = {
        "copy": (lambda: target.copy_(source), 2.0 * source.nbytes),
        "read": (source.sum, 1.0 * source.nbytes),
        "matrix": (lambda: torch.mm(a, b, out=product), 2.0 * side**3),
    }
    for run, _ in work.values():
        run()
    if device.type == "cuda":  # let its clocks rise
        for _ in range(100):
            torch.mm(a, b, out=product)
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, (run, amount) in work.items():
            found[name].append(5 * amount / seconds(run, device, 5))
    return found


def roofs_of(found: Mapping[str, Sequence[float]]) -> Roofs:
    return Roofs(*(median(found[name]) for name in ("copy", "read", "matrix")))


def describe(device: torch.device) -> list[str]:
    """Lines about the device, for the head of a report."""
    properties = torch.cuda.get_device_properties(device)
    cache = getattr(properties, "L2_cache_size", 0)
    lines = [
        f"{properties.name}, {properties.multi_processor_count} SMs, {cache / 2**20:.0f} MiB of L2, "
        f"{properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}.{properties.minor}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}",
    ]
    wanted = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu,driver_version"
    try:
        asked = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader", f"--id={device.index or 0}"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        pairs = zip(wanted.split(","), answer.splitlines()[0].split(","), strict=True)
        lines.append(", ".join(f"{name} {value.strip()}" for name, value in pairs))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        lines.append(f"nvidia-smi tells nothing ({type(error).__name__})")
    return lines


def case_roofline(bench: Bench) -> None:
    """What the device can do: the roofs that the other cases are measured against (each of them looks again)."""
    for line in describe(bench.device):
        print(f"roofline  {line}", flush=True)
    properties = torch.cuda.get_device_properties(bench.device)
    cache = getattr(properties, "L2_cache_size", 0) / 2**20
    bench.report.show("SMs", [properties.multi_processor_count], more={"device": properties.name, "L2 MiB": cache})
    found = rates(bench.device)
    bench.report.show("copy, bytes read + written", [rate / 1e9 for rate in found["copy"]], "GB/s")
    bench.report.show("sum, bytes read", [rate / 1e9 for rate in found["read"]], "GB/s")
    bench.report.show("bf16 product of 8192^3", [rate / 1e12 for rate in found["matrix"]], "TFLOP/s")
    for line in describe(bench.device)[2:]:  # the clocks under load
        print(f"roofline  {line}", flush=True)
