"""How evenly the work of a step falls among threads: balance.py [MODEL] [--threads 2 4 8 16 32 64] [--case NAME ...]

Teams of so many threads are simulated, whatever the machine has (csrc/cpu/common/simulated_team.h): one of them runs at
a time, the one that is behind. Printed is the share of a team's time in which its threads work, which is 1 where all of
them end together; and how many microseconds its parallel regions take on average, if all other threads wake three
microseconds behind the caller. What caches and memory would do on a machine of so many cores is not simulated.

MODEL: the folder of a Llama in bf16; default: that of cpu.py.

decode      a step of one stream, behind 248 tokens
batch       a step of 32 streams, behind 248 tokens each
long        a step of one stream, behind 3,500 tokens
prefill     512 tokens of a prompt
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cpu import add, make_llama
from machine import processor

from quire import LLM
from quire.kernels import native
from quire.platform.engine.llm_engine import LLMEngine

CASES = {"decode": (1, 248), "batch": (32, 248), "long": (1, 3500), "prefill": (1, 512)}  # streams, tokens of each
STEPS = 3  # added up: what is counted is the cores' time, which differs little


def ready(engine: LLMEngine, streams: int, tokens: int) -> None:
    """So many sequences have their prompts behind them."""
    for number in range(streams):
        add(engine, f"{number}", [10 + (number + place) % 200 for place in range(tokens)], STEPS + 8)
    while any(not one.output_ids for one in engine.scheduler.sequences()):
        engine.step()


def measure(llm: LLM, case: str, threads: int) -> tuple[float, float]:
    """(share of the team's time in which threads work, seconds of a region)"""
    engine, (streams, tokens) = llm.llm_engine, CASES[case]
    engine.reset_prefix_cache()
    if case == "prefill":
        add(engine, "0", [10 + place % 200 for place in range(tokens)], 1)
    else:
        ready(engine, streams, tokens)
    native.simulate_team(threads)
    try:
        for _ in range(1 if case == "prefill" else STEPS):
            engine.step()
        regions, work, last = native.simulated_time()
    finally:
        native.simulate_team(0)
    engine.abort_request([f"{number}" for number in range(streams)])
    while engine.has_unfinished_requests():
        engine.step()
    return work / (threads * last), last / regions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = args.model or make_llama(Path(work) / "llama")
        # Recorded steps have one region for all kernels, which hides how even each of them is.
        llm = LLM(str(model), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=64)
        print(f"{processor()}, {native.isa()}; share of the time in which threads work (microseconds of a region)")
        print(f"{'':10}" + "".join(f"{threads:>7} threads" for threads in args.threads))
        for case in args.case:
            measure(llm, case, 2)  # memory is there
            found = [measure(llm, case, threads) for threads in args.threads]
            print(f"{case:10}" + "".join(f"{even:8.2f} ({1e6 * took:4.0f})" for even, took in found), flush=True)


if __name__ == "__main__":
    main()
