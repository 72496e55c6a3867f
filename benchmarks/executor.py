"""What a step costs more with the worker in a process of its own: pickling plans and results, the pipe, two wake-ups.

    python benchmarks/executor.py [MODEL] [--streams 32] [--steps 25] [--turns 40] [--threads 1] [--ray]
        [--kinds process]

Engines on the same model, one with its worker in this process, one with it in another, one of two processes that
compute it together, and one of two that have half of its layers each, take turns at decode steps of as many streams; a
step of the last one has half of them. The model is a tiny one that computes next to
nothing, so that the difference is the executor's, unless one is given: then the ratios say what it is of real steps.
With --ray, one worker in an actor of Ray's too, two of one node, and two of two nodes: of a cluster on this machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from quire import LLM, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "in_process": {},
    "process": {"executor": "process"},
    "two": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
# In this order: the first finds room on one node, the last on two alone.
RAY_KINDS: dict[str, dict[str, Any]] = {
    "ray_two": {"distributed_executor_backend": "ray", "tensor_parallel_size": 2},
    "ray": {"distributed_executor_backend": "ray"},
    "ray_nodes": {"distributed_executor_backend": "ray", "tensor_parallel_size": 2},
    "ray_stages": {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2},
}


@contextmanager
def cluster(threads: int) -> Iterator[None]:
    """Nodes on this machine, with room for these kinds and no more."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    each = max(1, threads // 2)
    sizes = (2 * each, threads, each, each, each, each)
    nodes = [{"num_cpus": cpus, "object_store_memory": 100 << 20} for cpus in sizes]
    made = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
    for node in nodes[1:]:
        made.add_node(**node)
    os.environ["RAY_ADDRESS"] = made.address
    try:
        yield
    finally:
        ray.shutdown()
        made.shutdown()


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

    def __init__(self, path: Path, settings: dict[str, Any], streams: int, tokens: int) -> None:
        llm = LLM(
            str(path), **settings, skip_tokenizer_init=True, max_num_seqs=streams,
            num_gpu_blocks_override=streams * (tokens // 8 + 2),
        )  # fmt: skip
        self.engine, self.streams = llm.llm_engine, streams
        self._still = 0.0  # seconds before a turn: longer than a step of any engine
        params = SamplingParams(temperature=0, max_tokens=tokens - 8, ignore_eos=True, detokenize=False)
        for stream in range(streams):
            self.engine.add_request(str(stream), {"prompt_token_ids": [3 + stream % 300, 5, 7]}, params)

    def take(self, steps: int) -> float:
        """The mean time of so many in which every stream gets a token, in microseconds. What engines have in flight
        between two turns is computed before the time begins."""
        time.sleep(self._still)
        while not self.engine.step():
            pass
        begun, came = time.perf_counter(), 0
        while came < steps * self.streams:
            came += len(self.engine.step())
        seconds = (time.perf_counter() - begun) / came * self.streams
        self._still = 3 * seconds
        return seconds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="of an engine, shared by its processes")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=25, help="of a turn")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="beside the one in this process")
    parser.add_argument("--ray", action="store_true", help="on a cluster of Ray's, too: pip install 'quire-llm[ray]'")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokens = 64 + (given.steps + 2) * (given.turns + 1)
    kinds = {kind: settings for kind, settings in KINDS.items() if kind in ("in_process", *given.kinds)}
    kinds |= RAY_KINDS if given.ray else {}
    with tempfile.TemporaryDirectory() as folder, cluster(given.threads) if given.ray else nullcontext():
        if given.model is None:
            save_model(Path(folder), tokens)
        engines = {
            kind: Turns(given.model or Path(folder), settings, given.streams, tokens)
            for kind, settings in kinds.items()
        }
        medians: dict[str, list[float]] = {kind: [] for kind in kinds}
        for engine in engines.values():
            engine.take(20)  # prompts, and shapes that are met first
        for turn in range(given.turns):
            for kind in kinds if turn % 2 == 0 else reversed(kinds):
                medians[kind].append(engines[kind].take(given.steps))
        for engine in engines.values():
            engine.engine.close()
    for kind in kinds:
        least, middle = quantiles(medians[kind], n=10)[0], median(medians[kind])
        print(f"{kind:11} {middle:8.0f} us a step; in the calmest tenth of the turns {least:.0f}")
    alone = medians["in_process"]
    for kind in list(kinds)[1:]:
        pairs = list(zip(alone, medians[kind], strict=True))
        more, ratio = median(b - a for a, b in pairs), median(a / b for a, b in pairs)
        calm = quantiles(medians[kind], n=10)[0] - quantiles(alone, n=10)[0]
        print(
            f"{kind:11} costs {more:.0f} us; in the calmest {calm:.0f}; {ratio:.3f} of the steps a second "
            f"({given.streams} streams, {given.turns} turns)"
        )


if __name__ == "__main__":
    main()
