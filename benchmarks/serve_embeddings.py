"""What HTTP costs embeddings: serve_embeddings.py [--model small|base] [--dtype D] [--rounds N] [--texts N]

The texts and the BERT of embeddings.py, by `LLM.embed` and through `/v1/embeddings`, in turns: from 32 connections with
one text a body, and from 4 with 64. The server and the clients, which are as light as they can be, are a process each,
on the same cores. Printed are medians, the rounds' ratios to `LLM.embed`, and the clients' share of one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from embeddings import MODELS, TARGETS, make_bert
from machine import processor
from peers.contender import HERE
from peers.texts import texts
from serve import Server

from quire import LLM

CASES = ((32, 1), (4, 64))  # connections, texts a body
FLAGS = {"max_num_batched_tokens": 4096, "max_num_seqs": 256}


class Clients:
    """Connections of a process of their own, which asks each time for all of the texts. encoding: of the vectors."""

    def __init__(self, server: Server, folder: Path, connections: int, per_body: int, encoding: str) -> None:
        self.name = f"HTTP, {connections} connections with {per_body} a body"
        self._file = folder / f"{connections}-{per_body}.jsonl"
        self._per_body = per_body
        self._encoding = encoding
        script = [sys.executable, str(HERE / "http_client.py"), server.host, str(server.port), "/v1/embeddings"]
        self._process = subprocess.Popen(
            [*script, str(connections)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, given: list[str]) -> tuple[float, float]:
        """(seconds, the clients' own seconds of processor time)"""
        parts = [given[start : start + self._per_body] for start in range(0, len(given), self._per_body)]
        inputs = [part if self._per_body > 1 else part[0] for part in parts]
        bodies = [json.dumps({"input": one, "encoding_format": self._encoding}) + "\n" for one in inputs]
        self._file.write_text("".join(bodies))
        assert self._process.stdin is not None and self._process.stdout is not None
        print(self._file, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the clients broke off")
        took, used = json.loads(answer)
        return took, used

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(model: Path, dtype: str, rounds: int, given: list[tuple[str, int]], encoding: str) -> None:
    """Print texts a second of each, and of HTTP also the share of `LLM.embed`'s."""
    llm = LLM(str(model), dtype=dtype, **FLAGS)
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with ExitStack() as stack:
        server = stack.enter_context(Server(str(model), "--dtype", dtype, *flags))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = [Clients(server, folder, *case, encoding) for case in CASES]
        for one in clients:
            stack.callback(one.close)
        offline: list[float] = []
        found: dict[str, list[tuple[float, float]]] = {one.name: [] for one in clients}
        for turn in range(-1, rounds):
            asked = [text for text, _ in (given[:64] if turn < 0 else given)]
            begin = time.perf_counter()
            llm.embed(asked, use_tqdm=False)
            took = time.perf_counter() - begin
            offline += [took] if turn >= 0 else []
            for one in clients:
                run = one.run(asked)
                found[one.name] += [run] if turn >= 0 else []
    print(f"{'LLM.embed':42} {len(given) / median(offline):8.1f} texts/s")
    for name, runs in found.items():
        pairs = sorted(base / took for (took, _), base in zip(runs, offline, strict=True))
        share = median(used / took for took, used in runs)
        rate = len(given) / median(took for took, _ in runs)
        spread = f"{median(pairs):.3f} of LLM.embed ({pairs[0]:.3f} - {pairs[-1]:.3f})"
        print(f"{name:42} {rate:8.1f} texts/s   {spread}   clients {100 * share:.1f} % of a core", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dtype", choices=TARGETS, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--longest", type=int, default=256, help="tokens of a text; the shortest has 16")
    parser.add_argument("--encoding", choices=("float", "base64"), default="float")
    args = parser.parse_args()
    print(processor())
    with tempfile.TemporaryDirectory() as folder:
        model = make_bert(Path(folder) / args.model, MODELS[args.model], getattr(torch, args.dtype))
        print(f"{args.model}, {args.dtype}, {args.texts} texts of 16 - {args.longest} tokens, {args.encoding}")
        measure(model, args.dtype, args.rounds, texts(args.texts, 16, args.longest), args.encoding)


if __name__ == "__main__":
    main()
