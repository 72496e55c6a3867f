"""What a step costs more with the worker in a process of its own: pickling plans and results, the pipe, two wake-ups.

    python benchmarks/executor.py [MODEL] [--streams 32] [--steps 25] [--turns 40] [--threads 1]

Engines on the same model, one with its worker in this process, one with it in another, and one of two processes that
compute it together, take turns at decode steps of as many streams. The model is a tiny one that computes next to
nothing, so that the difference is the executor's, unless one is given: then the ratios say what it is of real steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from quire import LLM, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "in_process": {},
    "process": {"executor": "process"},
    "two": {"tensor_parallel_size": 2},
}


def save_model(path: Path, positions: int) -> None:
    """A Llama of two small layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


class Turns:
    """An engine whose streams never end."""

    def __init__(self, path: Path, kind: str, streams: int, tokens: int) -> None:
        llm = LLM(
            str(path), **KINDS[kind], skip_tokenizer_init=True, max_num_seqs=streams,
            num_gpu_blocks_override=streams * (tokens // 8 + 2),
        )  # fmt: skip
        self.engine = llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=tokens - 8, ignore_eos=True, detokenize=False)
        for stream in range(streams):
            self.engine.add_request(str(stream), {"prompt_token_ids": [3 + stream % 300, 5, 7]}, params)

    def take(self, steps: int) -> float:
        """The median step of so many, in microseconds."""
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - begun)
        return median(seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="of an engine, shared by its processes")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=25, help="of a turn")
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokens = 64 + given.steps * (given.turns + 1)
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            save_model(Path(folder), tokens)
        engines = {kind: Turns(given.model or Path(folder), kind, given.streams, tokens) for kind in KINDS}
        medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for engine in engines.values():
            engine.take(20)  # prompts, and shapes that are met first
        for turn in range(given.turns):
            for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                medians[kind].append(engines[kind].take(given.steps))
        for engine in engines.values():
            engine.engine.close()
    for kind in KINDS:
        least, middle = quantiles(medians[kind], n=10)[0], median(medians[kind])
        print(f"{kind:11} {middle:8.0f} us a step; in the calmest tenth of the turns {least:.0f}")
    alone = medians["in_process"]
    for kind in ("process", "two"):
        pairs = list(zip(alone, medians[kind], strict=True))
        more, ratio = median(b - a for a, b in pairs), median(a / b for a, b in pairs)
        calm = quantiles(medians[kind], n=10)[0] - quantiles(alone, n=10)[0]
        print(
            f"{kind:11} costs {more:.0f} us; in the calmest {calm:.0f}; {ratio:.3f} of the steps a second "
            f"({given.streams} streams, {given.turns} turns)"
        )


if __name__ == "__main__":
    main()
