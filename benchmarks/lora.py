"""What adapters cost: lora.py MODEL [--case four|many|ranks|load|scale|all] [--rounds N] [--dtype D]

Ratios in one run, on the workload of `quire bench` (32 requests, each with its own prompt and output length): every
case takes turns with the base model on the very same requests, so that what else the machine does hits both.
Adapters have random weights on all seven linears (rank 16 unless said), and are made in a temporary folder.

four    an engine without LoRA; LoRA enabled, no adapter in use; four adapters mixed over 32 requests
many    64 adapters over 64 requests
ranks   four adapters of rank 8, of 64, and two of each, over 16 requests: what a rank costs
load    16 streams decode while adapters are loaded: the gaps between a stream's tokens
scale   2,000 registered adapters, 100 in use at once by random choice, beside 5
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import psutil
import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.cli.workload import VOCABULARY, Requests, workload

LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
Adapters = list[LoRARequest | None]


def make_adapter(llm: LLM, path: Path, rank: int, seed: int) -> LoRARequest:
    """A PEFT adapter with random weights on all seven linears of a Llama, small enough to leave the text finite."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in llm.llm_engine.executor.runner.model.named_modules():
        if name.rpartition(".")[2] in (*LINEARS["self_attn"], *LINEARS["mlp"]):
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                weight = torch.randn(shape, generator=draw) * 0.02
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = weight.to(torch.bfloat16)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    targets = [*LINEARS["self_attn"], *LINEARS["mlp"]]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(path.name, lora_path=str(path))


def run(llm: LLM, requests: Requests, adapters: Adapters, salt: str) -> float:
    """Output tokens per second; adapters[i % len] serves request i."""
    engine = llm.llm_engine
    made = 0
    begin = time.perf_counter()
    for index, (token_ids, wanted) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
        prompt = {"prompt_token_ids": token_ids, "cache_salt": salt}
        engine.add_request(f"{salt}-{index}", prompt, params, adapters[index % len(adapters)])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if isinstance(output, RequestOutput) and output.finished:
                made += len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - begin
    assert made == sum(wanted for _, wanted in requests)
    return made / seconds


def compare(what: str, sides: dict[str, tuple[LLM, Adapters]], requests: Requests, rounds: int) -> None:
    """Print the median rate of each side and its ratio to the first."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for name, (llm, adapters) in sides.items():
        run(llm, [(ids[:16], 4) for ids, _ in requests], adapters, f"{what}-{name}-warm")
    for turn in range(rounds):
        for name, (llm, adapters) in sides.items():
            rates[name].append(run(llm, requests, adapters, f"{what}-{name}-{turn}"))
    first = next(iter(rates.values()))
    for name, found in rates.items():
        ratios = [rate / base for rate, base in zip(found, first, strict=True)]
        print(
            f"{what:8} {name:28} {median(found):8.1f} out tok/s   ratio {median(ratios):.3f} "
            f"({min(ratios):.3f} - {max(ratios):.3f})",
            flush=True,
        )


def case_four(args, llm: LLM, folder: Path) -> None:
    plain = LLM(args.model, dtype=args.dtype, skip_tokenizer_init=True, max_num_seqs=64)
    adapters: Adapters = [make_adapter(llm, folder / f"four{i}", 16, i) for i in range(4)]
    sides = {
        "without LoRA": (plain, [None]),
        "enabled, unused": (llm, [None]),
        "4 adapters of rank 16": (llm, adapters),
    }
    compare("four", sides, workload(vocab=args.vocab), args.rounds)


def case_many(args, llm: LLM, folder: Path) -> None:
    adapters: Adapters = [make_adapter(llm, folder / f"many{i}", 16, i) for i in range(64)]
    sides = {"base": (llm, [None]), "64 adapters of rank 16": (llm, adapters)}
    compare("many", sides, workload(64, vocab=args.vocab), args.rounds)


def case_ranks(args, llm: LLM, folder: Path) -> None:
    small: Adapters = [make_adapter(llm, folder / f"small{i}", 8, i) for i in range(4)]
    large: Adapters = [make_adapter(llm, folder / f"large{i}", 64, i) for i in range(4)]
    mixed = [small[0], large[0], small[1], large[1]]
    sides = {
        "base": (llm, [None]),
        "ranks 8, 8, 8, 8": (llm, small),
        "ranks 8, 64, 8, 64": (llm, mixed),
        "ranks 64, 64, 64, 64": (llm, large),
    }
    compare("ranks", sides, workload(16, vocab=args.vocab), args.rounds)


def case_load(args, llm: LLM, folder: Path) -> None:
    """Gaps between a stream's tokens while nothing is loaded, and while an adapter is, in turns."""
    paths = [make_adapter(llm, folder / f"load{i}", 16, i).lora_path for i in range(8)]
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for index, (token_ids, _) in enumerate(workload(16, vocab=args.vocab, prompt=(32, 64))):
        engine.add_request(f"stream-{index}", {"prompt_token_ids": token_ids}, params)
    for _ in range(20):
        engine.step()
    gaps: dict[bool, list[float]] = {False: [], True: []}
    loads: list[float] = []

    def load(number: int, path: str) -> None:
        loads.append(engine.load_lora_adapter(f"load{number}", path).seconds)

    for number, path in enumerate(paths):
        thread = threading.Thread(target=load, args=(number, path))
        for step in range(40):
            if step == 20:
                thread.start()
            loading = thread.is_alive()
            begin = time.perf_counter()
            engine.step()
            gaps[loading].append(time.perf_counter() - begin)
        thread.join()
    engine.abort_request([f"stream-{index}" for index in range(16)])
    idle, busy = gaps[False], gaps[True]
    print(
        f"load     16 streams: median gap {1000 * median(idle):.1f} ms, longest {1000 * max(idle):.1f} ms; while an "
        f"adapter loads ({1000 * median(loads):.0f} ms each): median {1000 * median(busy):.1f} ms, longest "
        f"{1000 * max(busy):.1f} ms, longest - median = {(max(busy) - median(idle)) / median(idle):.2f} steps",
        flush=True,
    )


def case_scale(args, llm: LLM, folder: Path) -> None:
    """Registered adapters mostly lie on the disk; those in use are drawn anew for each turn."""
    count, in_use = args.registered, 100
    requests = workload(in_use, vocab=args.vocab, prompt=(16, 64), output=(16, 48))
    made = [make_adapter(llm, folder / f"scale{i}", 2, i) for i in range(count)]
    begin = time.perf_counter()
    for adapter in made:
        llm.load_lora_adapter(adapter.lora_name, adapter.lora_path)
    seconds = time.perf_counter() - begin
    sizes = {info.name: info.bytes for info in llm.list_lora_adapters()}
    print(f"scale    {count} adapters of {sizes['scale0']:,} bytes registered in {seconds:.1f} s", flush=True)
    draw = random.Random(0)
    ratios, process = [], psutil.Process()
    for turn in range(args.rounds):
        few: Adapters = list(made[:5])
        many: Adapters = draw.sample(made, in_use)
        base = run(llm, requests, few, f"few-{turn}")
        rate = run(llm, requests, many, f"many-{turn}")
        ratios.append(rate / base)
        registry, on_device = llm.llm_engine.adapters, llm.llm_engine.scheduler.adapters.device
        print(
            f"scale    5 adapters {base:.1f}, {in_use} of {count} {rate:.1f} out tok/s: ratio {rate / base:.3f}; host "
            f"{registry.host_bytes / 1e6:.0f} MB, device {on_device.bytes / 1e6:.0f} of "
            f"{on_device.capacity / 1e6:.0f} MB, resident memory {process.memory_info().rss / 1e6:.0f} MB",
            flush=True,
        )
    print(f"scale    median ratio {median(ratios):.3f}", flush=True)
    llm.llm_engine.check_integrity()


CASES = {
    "four": case_four, "many": case_many, "ranks": case_ranks, "load": case_load, "scale": case_scale,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a Llama")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype")
    parser.add_argument("--registered", type=int, default=2000)
    parser.add_argument("--host-bytes", type=int, default=1 << 30)
    args = parser.parse_args()
    for name in CASES if args.case == "all" else [args.case]:
        llm = LLM(
            args.model, dtype=args.dtype, skip_tokenizer_init=True, enable_lora=True, max_num_seqs=64,
            lora_host_bytes=args.host_bytes,
        )  # fmt: skip
        args.vocab = min(VOCABULARY, llm.llm_engine.limits.vocab_size)
        folder = Path(tempfile.mkdtemp(prefix="quire-lora-"))
        try:
            CASES[name](args, llm, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
