"""A mixture of experts on a CPU, shaped as Mixtral: experts.py [MODEL] [--case NAME ...] [--rounds 5]

MODEL: the folder of a Mixtral in bf16; default: one of 650 M random parameters, 8 experts of which each token goes
through 2, made on the spot.

batch       32 requests of mixed lengths (`quire bench`'s), in turns with transformers' generate on one batch of them
decode      one stream's decode alone: bytes of the weights that its token goes through a second, of the memory's read
            rate; and the same over all weights, which a step would read that knows no experts
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from cpu import add, ratios, show
from machine import Machine

from quire import LLM
from quire.cli.contest import Quire, Transformers
from quire.cli.workload import workload
from quire.kernels import native
from quire.layers import Experts, Linear

MIXTRAL = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 1792, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "max_position_embeddings": 4096, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
BATCH, STEPS = 32, 100  # requests; tokens of the decode that is timed


def make(path: Path) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    if not (path / "config.json").exists():
        torch.manual_seed(0)
        MixtralForCausalLM(MixtralConfig(**MIXTRAL)).to(torch.bfloat16).save_pretrained(path)
    return path


def weight_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """(of the linears that a token goes through, of all linears)"""
    everything = sum(one.weight.nbytes for one in model.modules() if isinstance(one, Linear))
    left_out = 0
    for experts in (one for one in model.modules() if isinstance(one, Experts)):
        own = sum(one.weight.nbytes for one in experts.modules() if isinstance(one, Linear))
        left_out += own - own // len(experts) * experts.chosen
    return everything - left_out, everything


def case_batch(path: Path, llm: LLM, rounds: int) -> None:
    sides = [Quire(llm), Transformers(str(path), torch.bfloat16, torch.device("cpu"))]
    requests = workload(BATCH, vocab=llm.llm_engine.limits.vocab_size)
    for side in sides:
        side.run([(token_ids[:32], 4) for token_ids, _ in requests], "warm")
    rates = [[side.run(requests, f"batch-{turn}").rate for side in sides] for turn in range(rounds)]
    ours, theirs = (list(one) for one in zip(*rates, strict=True))
    show("batch", "quire", ours, unit="out tok/s")
    show("batch", "transformers", theirs, unit="out tok/s")
    show("batch", "quire / transformers", ratios(ours, theirs), ">= 3")


def case_decode(path: Path, llm: LLM, rounds: int) -> None:
    engine, machine = llm.llm_engine, Machine()
    active, everything = weight_bytes(engine.executor.runner.model)
    prompt = workload(1, vocab=engine.limits.vocab_size)[0][0]
    found, reads = [], []
    for turn in range(rounds):
        read = machine.measure()
        add(engine, f"decode-{turn}", prompt, STEPS)
        engine.step()
        steps, begin = 0, time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
        seconds_a_step = (time.perf_counter() - begin) / steps
        reads.append(max(read, machine.measure()))
        found.append(active / seconds_a_step / reads[-1])
    show(
        "decode", f"{active / 1e6:.0f} MB a step, of {median(reads) / 1e9:.1f} GB/s that can be read", found, ">= 0.80"
    )
    show("decode", f"of all {everything / 1e6:.0f} MB", [one * everything / active for one in found])


CASES = {"batch": case_batch, "decode": case_decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-experts-") as work:
        path = args.model or make(Path(work) / "mixtral")
        llm = LLM(str(path), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64)
        print(f"{native.isa()}, {native.num_threads()} threads; medians of {args.rounds} rounds", flush=True)
        for name in args.case:
            CASES[name](path, llm, args.rounds)


if __name__ == "__main__":
    main()
