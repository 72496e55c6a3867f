"""quire on a GPU, beside what that GPU can do: gpu.py [--case NAME ...] [--rounds N] [--quick] [--json FILE]

Needs one NVIDIA GPU with some 80 GB. Every case runs in a process of its own, so that one that fails takes no other
with it, and measures the roofs anew: what a copy on the device moves, and bf16 products of 8192^3. Figures are medians,
with (least - most); sides of a comparison take turns. The model is a Llama 3 8B of random bf16 weights, made there.

roofline    copies, reads and products; the device and its clocks
attention   paged decode at 8k of context: bytes of keys and values, of a copy's; prefill at 4k: FLOPs, of the peak's
linear      the exact products by shape and number of tokens: of the roofline, and beside torch's F.linear
experts     a layer of Mixtral's and of Qwen3 A3B's experts: of the roofline of the weights that tokens go through
lora        what adapters of rank 16 and 64 add to the products of a layer
single      decode of one stream: bytes of weights, of a copy's; exact products and cuBLAS
idle        the share of steady decode steps in which the GPU does nothing, of 1 and 64 streams, with graphs and eager
start       LLM(...) on weights that are there: until ready, and until the first token
adapters    64 streams with 1, 8 and 64 adapters of rank 16, and with none where there could be some, beside none
batch       64 and 256 streams of 512 + 256 tokens: of the roofline, and beside transformers' generate_batch
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = {
    "roofline": "gpu_device", "attention": "gpu_kernels", "linear": "gpu_kernels", "lora": "gpu_kernels",
    "experts": "gpu_experts", "single": "gpu_engine", "idle": "gpu_engine", "start": "gpu_engine",
    "adapters": "gpu_engine", "batch": "gpu_engine",
}  # fmt: skip
_GRACE = 30  # seconds that a case gets beyond the limit before it is ended


def absent() -> str | None:
    """Why nothing can be measured here."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU (built for CUDA {torch.version.cuda})"
    try:
        import quire.kernels._cuda
    except ImportError as error:
        return f"quire's CUDA kernels were not built ({error})"
    if quire.kernels._cuda.device != "cuda":
        return "quire's CUDA kernels were built as their emulation"
    return None


def run_case(name: str, args: argparse.Namespace, device_name: str = "cuda:0") -> int:
    """One case, in this process. Returns the number of figures that failed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    import torch
    from gpu_device import Bench, Report, rates, roofs_of

    device = torch.device(device_name)
    report = Report(name, args.figures)
    deadline = time.monotonic() + args.limit
    bench = Bench(device, report, 1 if args.quick else args.rounds, args.quick, deadline)
    case: Callable[[Bench], None] = getattr(import_module(MODULES[name]), f"case_{name}")
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]  # transformers must not find our kernels.py
    with report.trying(name):
        if name != "roofline":
            bench.roofs = roofs_of(rates(device, repeats=5))
            torch.cuda.empty_cache()
            roofs = f"{bench.roofs.copy / 1e9:.0f} GB/s copied, {bench.roofs.matrix / 1e12:.0f} TFLOP/s"
            print(f"{name:9} roofs: {roofs}", flush=True)
        case(bench)
    return report.failures


def run_all(args: argparse.Namespace, child: Callable[[str, Path, float], list[str]]) -> dict[str, Any]:
    """Every case in a process of its own. child: the command of one, its file of figures and its seconds."""
    end = time.monotonic() + args.limit
    found: dict[str, Any] = {"figures": [], "cases": {}}
    with tempfile.TemporaryDirectory(prefix="quire-figures-") as work:
        for name in args.case:
            left = end - time.monotonic()
            if left <= 0:
                print(f"{name:9} left out, time is up", flush=True)
                found["cases"][name] = "left out"
                continue
            file, begin = Path(work) / f"{name}.jsonl", time.monotonic()
            try:
                code = subprocess.run(child(name, file, left), timeout=left + _GRACE).returncode
                state = "done" if not code else f"failed, code {code}"
            except subprocess.TimeoutExpired:
                state = "ended, time is up"
            print(f"{name:9} {state} after {time.monotonic() - begin:.0f} s", flush=True)
            found["cases"][name] = state
            if file.exists():
                found["figures"] += [json.loads(line) for line in file.read_text().splitlines()]
            if args.json:
                args.json.write_text(json.dumps(found, indent=2))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--case", nargs="+", choices=MODULES, default=list(MODULES))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--quick", action="store_true", help="one round, fewer sizes")
    made.add_argument("--json", type=Path, help="all figures, written after every case")
    made.add_argument("--limit", type=float, default=540, help="seconds after which nothing new is begun")
    made.add_argument("--figures", type=Path, help=argparse.SUPPRESS)  # of one case, which runs in this process then
    return made


def main() -> int:
    args = parser().parse_args()
    reason = absent()
    if reason is not None:
        print(f"gpu.py measures a GPU: {reason}.", file=sys.stderr)
        return 2
    if args.figures is not None:
        return min(100, sum(run_case(name, args) for name in args.case))
    line = [sys.executable, __file__, "--rounds", str(args.rounds), *["--quick"] * args.quick]
    found = run_all(args, partial(command, line))
    missed = [one for one in found["figures"] if one["met"] is False]
    wanted = [one for one in found["figures"] if one["met"] is not None]
    print(f"{len(wanted) - len(missed)} of {len(wanted)} targets met", flush=True)
    for one in missed:
        print(f"missed    {one['case']}: {one['name']}: {one['value']:.4g}, target {one['target']:g}", flush=True)
    return 0 if all(state == "done" for state in found["cases"].values()) else 1


def command(line: list[str], name: str, file: Path, left: float) -> list[str]:
    return [*line, "--case", name, "--figures", str(file), "--limit", str(left)]


if __name__ == "__main__":
    sys.exit(main())
