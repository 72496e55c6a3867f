"""quire on quantized weights beside its peers on the same: quantized.py [MODEL] [--case NAME ...] [--kinds NAME ...]

MODEL: the folder of a Llama in bf16; default: one of 254 M random parameters, made on the spot. Kinds Q8_0, Q4_0 and
Q4_K_M are GGUF files of it, the last by llama.cpp's own quantizer with the mixture of Q4_K and Q6_K that its files
have, read by quire and llama.cpp both; int8 is the model itself with quantization="int8" (bf16 in the file), beside
OpenVINO's own int8 of it. As in `cpu.py`, contenders take turns in processes of their own, each stopped while another
runs; peers live in PEERS/llamacpp and PEERS/openvino, and are left out by name where they are missing. llama.cpp runs
by its C interface with 32 slots and continuous batching, without HTTP (`peers/run_llamacpp.py`).

decode      one stream after a prompt of 16 tokens: the seconds of 129 output tokens less those of 1. Beside the peer,
            and as bytes (weights and KV) a second of the memory's read rate
batch       32 requests of mixed lengths (`quire bench`'s), beside the peer and beside quire's own bf16
prefill     512 prompt tokens and one output token, beside the peer
lora        the 32 requests with four adapters of rank 16, beside none
start       LLM(...) in a fresh process with its files in the page cache, beside the checkpoint in bf16; memory of that
            process, all of the weights and the KV pool touched
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from cpu import Bench, make_llama, ratios, show
from lora import make_adapter
from machine import processor
from peers.contender import HERE, Absent, Contender, find, made
from startup import fresh

from quire.cli.workload import workload
from quire.kernels import native

KINDS = ("Q8_0", "Q4_0", "Q4_K_M", "int8")
OPTIONS = {"dtype": "auto", "kv_cache_memory_bytes": 1 << 30}
PROMPT, OUTPUT, PREFILL = 16, 128, 512  # tokens
DECODE = {"llama.cpp": ">= 1.15", "OpenVINO": ">= 1.15"}
BATCHED = {"llama.cpp": ">= 2", "OpenVINO": ">= 1.15", "quire, bf16": ">= 1.3"}
FILLED = {"llama.cpp": ">= 1", "OpenVINO": ""}


class Quantized(Bench):
    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        args.model = args.model or make_llama(work / "llama")
        super().__init__(args, work)
        self.kinds: list[str] = args.kinds
        self.work.mkdir(exist_ok=True)

    def file(self, kind: str) -> Path:
        """The model as a GGUF file. Raises Absent."""
        python = find(self.home, "llamacpp") if "_K" in kind else sys.executable
        line = [python, str(HERE / "to_gguf.py"), str(self.model), "--kind", kind]
        return made(self.work / f"{kind}.gguf", line)

    def quire(self, kind: str, loras: Path | None = None) -> list[str]:
        """What starts quire on a kind of weights. Raises Absent."""
        model, options = self.options(kind)
        line = [sys.executable, str(HERE / "run_quire.py"), model, "--options", json.dumps({**OPTIONS, **options})]
        return [*line, "--loras", str(loras)] if loras else line

    def options(self, kind: str) -> tuple[str, dict[str, object]]:
        """The model's path, and what LLM takes besides."""
        if kind == "int8":
            return str(self.model), {"quantization": "int8"}
        return str(self.model if kind == "bf16" else self.file(kind)), {}

    def peer(self, kind: str) -> tuple[str, Callable[[], list[str]]]:
        """Its name, and what gives the line that starts it."""
        if kind == "int8":
            return "OpenVINO", self.openvino
        return "llama.cpp", lambda: [find(self.home, "llamacpp"), str(HERE / "run_llamacpp.py"), str(self.file(kind))]

    def openvino(self) -> list[str]:
        python = find(self.home, "openvino")
        export = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "int8"]
        optimum = str(Path(python).with_name("optimum-cli"))
        path = made(self.work / "openvino-int8", [optimum, *export, "--model", str(self.model)])
        return [python, str(HERE / "run_openvino.py"), str(path)]

    def make(self) -> None:
        """All that the cases make of the model."""
        for kind in self.kinds:
            self.quire(kind)
            self.peer(kind)[1]()
        self.adapters()

    @contextmanager
    def sides(self, case: str, kind: str, bf16: bool = False) -> Iterator[list[Contender]]:
        """quire, its peer and, if wanted, quire in bf16, as far as they are there."""
        peer, line = self.peer(kind)
        lines = {"quire": lambda: self.quire(kind), peer: line}
        if bf16:
            lines["quire, bf16"] = lambda: self.quire("bf16")
        with ExitStack() as stack:
            found = []
            for name, start in lines.items():
                try:
                    found.append(Contender(name, start(), self.patience))
                    stack.callback(found[-1].close)
                except Absent as reason:
                    self.leave_out(f"{case} {kind}", name, reason)
            yield found

    def tell(self, case: str, kind: str, rates: dict[str, list[float]], targets: dict[str, str], unit: str) -> None:
        for name, found in rates.items():
            show(case, f"{kind}, {name}", found, unit=unit)
            if name != "quire":
                show(case, f"{kind}, quire / {name}", ratios(rates["quire"], found), targets[name])

    def weight_bytes(self, kind: str) -> float:
        """What a token reads of the weights: all but the embedding."""
        if kind == "int8":  # groups of 32 with a scale in float16
            from safetensors import safe_open

            with safe_open(self.model / "model.safetensors", "pt") as file:
                names = [name for name in file.keys() if not name.endswith(("norm.weight", "embed_tokens.weight"))]  # noqa: SIM118
                return sum(34 / 32 * file.get_tensor(name).numel() for name in names)
        from gguf import GGUFReader

        return sum(
            tensor.n_bytes for tensor in GGUFReader(self.file(kind)).tensors if tensor.name != "token_embd.weight"
        )

    def decode(self, kind: str) -> None:
        config = json.loads((self.model / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        kv = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head  # in 16 bits, of a token
        size = self.weight_bytes(kind) + kv * (PROMPT + OUTPUT / 2)
        token_ids = workload(1)[0][0][:PROMPT]
        reads: list[float] = []
        with self.sides("decode", kind) as sides:
            rates: dict[str, list[float]] = {side.name: [] for side in sides}
            for turn in range(-1, self.rounds):
                read = self.machine.measure()
                for side in sides:
                    one = 1 / side.rate("single", [(token_ids, 1)])
                    more = OUTPUT + 1 if turn >= 0 else 4
                    spent = more / side.rate("single", [(token_ids, more)]) - one
                    if turn >= 0:
                        rates[side.name].append((more - 1) / spent)
                if turn >= 0:
                    reads.append(max(read, self.machine.measure()))
        self.tell("decode", kind, rates, DECODE, "out tok/s")
        for name, found in rates.items():
            shares = [rate * size / read for rate, read in zip(found, reads, strict=True)]
            what = f"{kind}, {name}: of {median(reads) / 1e9:.1f} GB/s that can be read"
            show("decode", what, shares, ">= 0.90" if name == "quire" else "")

    def batch(self, kind: str) -> None:
        with self.sides("batch", kind, bf16=True) as sides:
            rates = self.turns(f"batch {kind}", sides, "batch", self.requests["batch"])
        self.tell("batch", kind, rates, BATCHED, "out tok/s")

    def prefill(self, kind: str) -> None:
        requests = [(workload(1, prompt=(PREFILL, PREFILL))[0][0], 1)]
        with self.sides("prefill", kind) as sides:
            rates = self.turns(f"prefill {kind}", sides, "single", requests)
        rates = {name: [PREFILL * rate for rate in found] for name, found in rates.items()}
        self.tell("prefill", kind, rates, FILLED, "tok/s")

    def adapters(self) -> Path:
        folder = self.work / "loras"
        if not folder.exists():
            llm = self.llm(enable_lora=True)
            for number in range(4):
                make_adapter(llm, folder / f"lora{number}", 16, number)
        return folder

    def lora(self, kind: str) -> None:
        requests = self.requests["batch"]
        side = Contender("quire", self.quire(kind, self.adapters()), self.patience)
        try:
            found = [(side.rate("batch", requests), side.rate("lora", requests)) for _ in range(self.rounds + 1)][1:]
        finally:
            side.close()
        show("lora", f"{kind}, four adapters", [adapted for _, adapted in found], unit="out tok/s")
        show("lora", f"{kind}, four adapters / none", [adapted / base for base, adapted in found], ">= 0.85")

    def start(self, kind: str) -> None:
        runs = []
        for _ in range(self.rounds + 1):  # the first brings the files into the page cache
            pair = []
            for which in (kind, "bf16"):
                model, options = self.options(which)
                pair.append(fresh(model, skip_tokenizer_init=True, **options))
            runs.append(pair)
        runs = runs[1:]
        for which, side in zip((kind, "bf16"), zip(*runs, strict=True), strict=True):
            show(
                "start", f"{which}, imports of torch and transformers apart", [one["ready_s"] for one in side], unit="s"
            )
        target = "<= 0.3" if kind != "int8" else ""
        show("start", f"{kind} - bf16", [own["ready_s"] - plain["ready_s"] for own, plain in runs], target, "s")
        for which, side in zip((kind, "bf16"), zip(*runs, strict=True), strict=True):
            last = side[-1]
            rest = last["rss_bytes"] - last["weights_bytes"] - last["pool_bytes"]
            parts = {"weights": last["weights_bytes"], "KV pool": last["pool_bytes"], "the rest": rest}
            said = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in parts.items())
            show("start", f"{which}: {said} MB; in all", [last["rss_bytes"] / 1e6], unit="MB")


CASES: dict[str, Callable[[Quantized, str], None]] = {
    name: getattr(Quantized, name) for name in ("decode", "batch", "prefill", "lora", "start")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/quire-peers"))
    parser.add_argument("--patience", type=float, default=600, help="seconds that a peer's start or run may take")
    parser.add_argument("--work", type=Path, help="a folder that keeps what is made of the model; default: none")
    parser.add_argument("--make", action="store_true", help="make the files in --work, and measure nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as work:
        bench = Quantized(args, args.work or Path(work))
        print(
            f"{processor()}: {native.isa()}, {native.num_threads()} threads; medians of {args.rounds} rounds",
            flush=True,
        )
        if args.make:
            bench.make()
            return
        for name in args.case:
            for kind in args.kinds:
                try:
                    CASES[name](bench, kind)
                except Absent as reason:
                    bench.leave_out(name, kind, reason)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contenders end too
    main()
