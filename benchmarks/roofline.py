"""What the linear kernel and whole steps reach of the machine's roofs: roofline.py [MODEL] [--out docs/roofline.png]

Two roofs, measured in the same minutes: the memory's read rate, and the best dense product seen (`machine.py`).
Linear: all the model's weights in turn, so that no cache holds them, at 1 to 512 tokens; torch's F.linear on the same,
in bf16 and in float32. Steps: whole steps of the engine, with attention, sampling and Python; decode of 1 to 64 streams
with some 64 tokens of context, and prefill of 512 tokens. Operations are those of the linear layers, bytes those of
their weights in bf16, once a step. A chart is written where --out names a file (needs matplotlib).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from cpu import add, linears, make_llama
from machine import Machine, seconds

from quire import LLM
from quire.cli.workload import workload
from quire.kernels import native, packed
from quire.platform.engine.llm_engine import LLMEngine

TOKENS, STREAMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512), (1, 2, 4, 8, 16, 32, 64)
Series = list[tuple[float, float]]  # (operations a byte, operations a second)


def linear_series(weights: Sequence[torch.Tensor], call: Callable[..., object], rounds: int) -> Series:
    numbers = sum(weight.numel() for weight in weights)
    found = []
    for tokens in TOKENS:
        sizes = [packed.memory(weight).shape[1] for weight in weights]
        inputs = {size: torch.ones(tokens, size, dtype=weights[0].dtype) for size in sizes}
        pairs = [(inputs[size], weight) for size, weight in zip(sizes, weights, strict=True)]
        best = min(sum(seconds(partial(call, x, w)) for x, w in pairs) for _ in range(rounds))
        found.append((float(tokens), 2 * tokens * numbers / best))
    return found


def step_series(engine: LLMEngine, rounds: int) -> Series:
    size = sum(linear.weight.numel() for linear in linears(engine))
    found = []
    for streams in STREAMS:
        for index, (token_ids, _) in enumerate(workload(streams, prompt=(48, 48))):
            add(engine, f"{streams}-{index}", token_ids, 40)
        while any(len(one.output_ids) < 4 for one in engine.scheduler.sequences()):
            engine.step()
        spent = [seconds(engine.step) for _ in range(5 * rounds)]
        found.append((float(streams), 2 * streams * size / median(spent)))
        while engine.has_unfinished_requests():
            engine.step()
    head = max(linear.weight.numel() for linear in linears(engine))  # of which prefill needs one row
    spent = []
    for turn in range(rounds):
        add(engine, f"prefill-{turn}", workload(1, seed=turn, prompt=(512, 512))[0][0], 1)
        spent.append(seconds(engine.step))
    return [*found, (512.0, 2 * 512 * (size - head) / min(spent))]


def chart(path: Path, machine: Machine, lines: dict[str, Series]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    xs = [0.7, machine.dense / machine.read, 700]
    roof = [x * machine.read / 1e9 for x in xs[:2]] + [machine.dense / 1e9]
    axes.plot(
        xs, roof, color="black", label=f"{machine.read / 1e9:.0f} GB/s read, {machine.dense / 1e9:.0f} GFLOP/s dense"
    )
    for (name, series), marker in zip(lines.items(), "o^xs", strict=False):
        axes.plot([x for x, _ in series], [y / 1e9 for _, y in series], marker=marker, markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte of weights (tokens a step)", ylabel="GFLOP/s")
    axes.set_title(f"{native.isa()}, {native.num_threads()} cores, 254 M Llama in bf16")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = args.model or make_llama(Path(work) / "llama")
        engine = LLM(str(model), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64).llm_engine
    machine = Machine()
    weights = [linear.weight.detach() for linear in linears(engine)]
    lines = {
        "quire, linear": linear_series(weights, lambda x, w: native.linear(x, (w,), (None,)), args.rounds),
        "quire, whole steps": step_series(engine, args.rounds),
    }
    machine.measure()
    for dtype in (torch.bfloat16, torch.float32):
        name = f"F.linear in {str(dtype).removeprefix('torch.')}"
        lines[name] = linear_series([packed.unpack(one).to(dtype) for one in weights], F.linear, args.rounds)
    machine.measure()
    roofs = f"{machine.read / 1e9:.1f} GB/s, {machine.dense / 1e9:.0f} GFLOP/s"
    print(f"{native.isa()}, {native.num_threads()} threads: {roofs}")
    for name, series in lines.items():
        for x, rate in series:
            roof = min(x * machine.read, machine.dense)
            print(f"{name:22} {x:5.0f} tokens  {rate / 1e9:6.1f} GFLOP/s  {rate / roof:5.2f} of the roof", flush=True)
    if args.out:
        chart(args.out, machine, lines)


if __name__ == "__main__":
    main()
