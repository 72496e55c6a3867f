"""Whole engines in `gpu.py`: one stream, batches, adapters, idle time and start of a Llama 3 8B of random weights."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from gpu_device import Bench
from gpu_kernels import exact
from gpu_model import LLAMA_3_8B, RandomModel, Work, adapter_folders
from gpu_peer import Peer

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.cli.workload import Requests, workload


@dataclass(frozen=True)
class Scale:
    """How large all of it is; tests take a small one."""

    settings: dict
    single: tuple[int, int] = (128, 384)  # prompt and output tokens
    batch: tuple[int, int] = (512, 256)
    streams: tuple[int, ...] = (64, 256)
    budgets: tuple[int, ...] = (2048, 8192)
    mixed: tuple[int, int] = (128, 128)  # with adapters
    adapters: tuple[int, ...] = (1, 8, 64)
    mixed_streams: int = 64
    rank: int = 16
    steady: tuple[int, ...] = (1, 64)  # streams whose idle time is looked at
    steps: int = 50

    def requests(self, streams: int, size: tuple[int, int], turn: int) -> Requests:
        """Random prompts of one length, new ones each turn."""
        prompt, output = size
        vocabulary = self.settings["vocab_size"]
        return workload(streams, 1000 + turn, (prompt, prompt), (output, output), vocabulary)


FULL = Scale(LLAMA_3_8B)
Best = dict[int, tuple[list[float], int]]  # streams -> (seconds, tokens a step)
Sides = dict[str, tuple[LLM, list[LoRARequest | None]]]


@contextmanager
def random_model(bench: Bench, scale: Scale, dtype: torch.dtype = torch.bfloat16) -> Iterator[RandomModel]:
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as home:
        yield RandomModel(Path(home) / "model", scale.settings, bench.device, dtype)


def pool(model: RandomModel, scale: Scale, streams: int, size: tuple[int, int]) -> int:
    """Bytes of keys and values of so many streams, and some to spare."""
    heads = scale.settings["num_attention_heads"]
    width = scale.settings["hidden_size"] // heads * scale.settings["num_key_value_heads"]
    token = 2 * scale.settings["num_hidden_layers"] * width * model.dtype.itemsize
    return int(1.1 * streams * (sum(size) + 16) * token) + (1 << 20)


def greedy(wanted: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)


def generate(llm: LLM, requests: Requests, salt: str, adapters: Sequence[LoRARequest | None] = (None,)) -> float:
    """Seconds that an engine takes for all of them; adapters[i % len] serves request i."""
    prompts = [{"prompt_token_ids": token_ids, "cache_salt": salt} for token_ids, _ in requests]
    params = [greedy(wanted) for _, wanted in requests]
    owners = [adapters[number % len(adapters)] for number in range(len(requests))]
    with using(llm):
        begin = time.perf_counter()
        found = llm.generate(prompts, params, lora_request=owners, use_tqdm=False)
        spent = time.perf_counter() - begin
    made = [len(output.outputs[0].token_ids) for output in found]
    if made != [wanted for _, wanted in requests]:
        reasons = {output.failure for output in found if output.failure is not None}
        raise RuntimeError(f"{sum(made)} tokens were generated, not all that were asked for: {reasons}")
    return spent


def using(llm: LLM) -> AbstractContextManager[None]:
    """How products are made is the process's setting: of the engine that is used, if there are several."""
    engine = llm.llm_engine
    return exact(engine.config.model.exact_products, engine.executor.runner.device)


def warm(
    bench: Bench,
    llm: LLM,
    scale: Scale,
    streams: int,
    size: tuple[int, int],
    adapters: Sequence[LoRARequest | None] = (None,),
) -> None:
    """A step is captured when its shape is met for the second time: two runs of what will be measured."""
    for turn in range(1 if bench.quick else 2):
        generate(llm, scale.requests(streams, size, turn), f"warm-{streams}-{len(adapters)}-{turn}", adapters)


# -- one stream ---------------------------------------------------------------------------------------------------


def token_seconds(llm: LLM, token_ids: list[int], wanted: int, name: str) -> float:
    """Seconds a token of one stream's decode, the first few left out."""
    engine = llm.llm_engine
    engine.add_request(name, {"prompt_token_ids": token_ids, "cache_salt": name}, greedy(wanted))
    stamps: list[tuple[float, int]] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if isinstance(output, RequestOutput):
                stamps.append((time.perf_counter(), len(output.outputs[0].token_ids)))
    (begin, first), (end, last) = stamps[len(stamps) // 8], stamps[-1]
    if last != wanted:
        raise RuntimeError(f"{last} tokens were generated, not {wanted}")
    return (end - begin) / (last - first)


def case_single(bench: Bench, scale: Scale = FULL) -> None:
    """Decode of one stream: bytes of weights a second, of what a copy moves; exact products and cuBLAS in turns."""
    sides = {"exact products": True, "cuBLAS": False}
    with random_model(bench, scale) as model, ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for name, exactly in sides.items():
            with bench.report.trying(name):
                options = {"max_num_seqs": 8, "kv_cache_memory_bytes": pool(model, scale, 4, scale.single)}
                llms[name] = stack.enter_context(model.serving(exact_products=exactly, **options))
        token_ids = scale.requests(1, scale.single, 0)[0][0]
        spent: dict[str, list[float]] = {name: [] for name in llms}
        for turn in range(-2, bench.rounds):
            for name, llm in llms.items():
                with bench.report.trying(name), using(llm):
                    seconds = token_seconds(llm, token_ids, scale.single[1], f"{name}-{turn}")
                    if turn >= 0:
                        spent[name].append(seconds)
        for name, found in spent.items():
            if not found:
                continue
            size = Work.of(llms[name].llm_engine.executor.runner.model).weights
            bench.report.show(f"{name}, tokens a second", [1 / one for one in found], "tok/s")
            shares = [size / one / bench.roofs.copy for one in found]
            more = {"ms": 1e3 * median(found), "GB": size / 1e9}
            bench.report.show(f"{name}, bytes of weights", shares, "of copy", 0.85, more=more)


# -- batches --------------------------------------------------------------------------------------------------------


def case_batch(bench: Bench, scale: Scale = FULL) -> None:
    """Many streams: output tokens a second, their share of the roofline, and beside transformers."""
    streams = scale.streams[:1] if bench.quick else scale.streams
    with random_model(bench, scale) as model:
        best: Best = {}
        work: Work | None = None
        for budget in scale.budgets:
            with bench.report.trying(f"steps of {budget} tokens"):
                bench.check_time()
                options = {"max_num_seqs": max(streams), "max_num_batched_tokens": budget}
                options["kv_cache_memory_bytes"] = pool(model, scale, max(streams), scale.batch)
                with model.serving(**options) as llm:
                    work = Work.of(llm.llm_engine.executor.runner.model)
                    for count in streams:
                        with bench.report.trying(f"{count} streams, steps of {budget} tokens"):
                            spent = batch_seconds(bench, llm, scale, count, budget)
                            if count not in best or median(spent) < median(best[count][0]):
                                best[count] = spent, budget
        for count, (spent, budget) in best.items():
            assert work is not None
            show_roof(bench, scale, work, count, spent, budget)
        beside_transformers(bench, scale, model, best)


def batch_seconds(bench: Bench, llm: LLM, scale: Scale, count: int, budget: int) -> list[float]:
    bench.check_time()
    warm(bench, llm, scale, count, scale.batch)
    spent = [generate(llm, scale.requests(count, scale.batch, 10 + turn), f"{count}-{turn}") for turn in bench.turns()]
    prompt, output = scale.batch
    what = f"{count} streams, steps of {budget} tokens"
    total = count * (prompt + output) / median(spent)
    bench.report.show(what, [count * output / one for one in spent], "out/s", more={"all tok/s": total})
    return spent


def show_roof(bench: Bench, scale: Scale, work: Work, count: int, spent: Sequence[float], budget: int) -> None:
    least = work.phases(bench.roofs, count, *scale.batch)
    overlapped = work.overlapped(bench.roofs, count, *scale.batch)
    bench.report.show(
        f"{count} streams, the better ({budget}): roofline",
        [least / one for one in spent],
        "of roof",
        0.6,
        more={
            "roof out/s": count * scale.batch[1] / least,
            "of perfect overlap": overlapped / median(spent),
        },
    )


def beside_transformers(bench: Bench, scale: Scale, model: RandomModel, best: Best) -> None:
    with bench.report.trying("transformers"):
        bench.check_time()
        peer = Peer(model.transformers())
        for count, (ours, _) in best.items():
            with bench.report.trying(f"transformers, {count} streams"):
                bench.check_time()
                spent = []
                with peer.session():
                    peer.seconds(scale.requests(count, scale.batch, 0))  # warms it up
                    for turn in bench.turns(min(2, bench.rounds)):
                        spent.append(peer.seconds(scale.requests(count, scale.batch, 10 + turn)))
                rates = [count * scale.batch[1] / one for one in spent]
                bench.report.show(f"transformers, {count} streams", rates, "out/s", more={"way": peer.way})
                ratios = [median(spent) / one for one in ours]
                bench.report.show(f"{count} streams: quire / transformers", ratios, "x", 3.0, more={"way": peer.way})


# -- adapters -------------------------------------------------------------------------------------------------------


def case_adapters(bench: Bench, scale: Scale = FULL) -> None:
    """A batch with adapters, beside the same without; and what it costs that there could be some."""
    count, most = scale.mixed_streams, max(scale.adapters)
    options = {"max_num_seqs": count, "max_num_batched_tokens": scale.budgets[0]}
    with random_model(bench, scale) as model, ExitStack() as stack:
        options["kv_cache_memory_bytes"] = pool(model, scale, count, scale.mixed)
        plain = stack.enter_context(model.serving(**options))
        folders = adapter_folders(plain, model.directory.parent / "adapters", most, scale.rank)
        size = int(1.1 * sum(file.stat().st_size for folder in folders for file in folder.iterdir()))
        room = {"lora_device_bytes": size, "lora_host_bytes": size}
        llm = stack.enter_context(model.serving(enable_lora=True, **room, **options))
        sides: Sides = {
            "no adapters": (plain, [None]),
            "enabled, not used": (llm, [None]),
        }
        requests = load(bench, llm, folders)
        for number in sorted(scale.adapters, reverse=True):  # whoever comes first has the tables grow
            sides[f"{number} adapters"] = llm, list(requests[:number])
        rates = turns(bench, scale, sides)
        base = rates.pop("no adapters")
        bench.report.show(f"{count} streams, no adapters", base, "out/s")
        for name, found in rates.items():
            target = 0.99 if name == "enabled, not used" else 0.92
            ratios = [one / other for one, other in zip(found, base, strict=False)]
            bench.report.show(f"{count} streams, {name} / none", ratios, "x", target, more={"out/s": median(found)})


def load(bench: Bench, llm: LLM, folders: Sequence[Path]) -> list[LoRARequest]:
    begin = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda folder: llm.load_lora_adapter(folder.name, str(folder)), folders))
    bench.report.show(f"{len(folders)} adapters loaded to main memory", [time.perf_counter() - begin], "s")
    return [LoRARequest(folder.name) for folder in folders]


def turns(bench: Bench, scale: Scale, sides: Sides) -> dict[str, list[float]]:
    """Output tokens a second of each side in each round; a side that fails has no more of them."""
    count = scale.mixed_streams
    alive: list[str] = []
    for name, (llm, adapters) in sides.items():
        with bench.report.trying(name):
            warm(bench, llm, scale, count, scale.mixed, adapters)
            alive.append(name)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in bench.turns(2 * bench.rounds):  # ratios near 1 need more of them
        requests = scale.requests(count, scale.mixed, 10 + turn)
        for name in list(alive):
            alive.remove(name)
            with bench.report.trying(name):
                llm, adapters = sides[name]
                rates[name].append(count * scale.mixed[1] / generate(llm, requests, f"{name}-{turn}", adapters))
                alive.append(name)
    return {name: found for name, found in rates.items() if found}


# -- idle time ------------------------------------------------------------------------------------------------------


def idle_share(intervals: Iterable[tuple[float, float]], least: float = 0.0) -> float:
    """The share of the time from the first begin to the last end in which none of the intervals (begin, end) is.

    least: gaps that are shorter do not count.
    """
    ordered = sorted(intervals)
    if not ordered:
        raise RuntimeError("the profiler saw no work of the GPU")
    first, busy_until = ordered[0]
    idle = 0.0
    for begin, end in ordered:
        gap = begin - busy_until
        if gap > 0 and gap >= least:
            idle += gap
        busy_until = max(busy_until, end)
    return idle / (busy_until - first) if busy_until > first else 0.0


def profiled(run: Callable[[], object]) -> list[tuple[float, float]]:
    """When the GPU was at something while `run` ran, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == cuda and not getattr(event, "is_user_annotation", False)
    ]


def steady(llm: LLM, scale: Scale, streams: int, name: str) -> Callable[[], object]:
    """Steps in which all of so many streams decode, over shapes that were met before. Returns what runs `steps`."""
    engine = llm.llm_engine
    for number, (token_ids, _) in enumerate(scale.requests(streams, (280, 1), 0)):
        prompt = {"prompt_token_ids": token_ids, "cache_salt": name}
        engine.add_request(f"{name}-{number}", prompt, greedy(4 * scale.steps + 100))
    while any(not one.output_ids for one in engine.scheduler.sequences()):
        engine.step()
    for _ in range(12):
        engine.step()

    def run() -> None:
        for _ in range(scale.steps):
            engine.step()

    return run


def case_idle(bench: Bench, scale: Scale = FULL) -> None:
    """The share of steady decode steps in which the GPU does nothing."""
    most = max(scale.steady)
    with random_model(bench, scale) as model:
        for name, eager in (("graphs", False), ("enforce_eager", True)):
            options = {"max_num_seqs": most, "max_num_batched_tokens": scale.budgets[0], "enforce_eager": eager}
            options["kv_cache_memory_bytes"] = pool(model, scale, most, (512, 256))
            with bench.report.trying(name), model.serving(**options) as llm:
                for streams in scale.steady:
                    with bench.report.trying(f"{name}, {streams} streams"):
                        bench.check_time()
                        idle_figures(bench, llm, scale, streams, name)


def idle_figures(bench: Bench, llm: LLM, scale: Scale, streams: int, name: str) -> None:
    engine = llm.llm_engine
    run = steady(llm, scale, streams, f"{name}-{streams}")
    try:
        begin = time.perf_counter()
        run()
        unseen = (time.perf_counter() - begin) / scale.steps
        profiled(engine.step)  # the profiler starts slowly
        intervals = profiled(run)
    finally:
        engine.abort_request([f"{name}-{streams}-{number}" for number in range(streams)])
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()  # what was in flight
    span = (max(end for _, end in intervals) - min(start for start, _ in intervals)) / scale.steps
    bench.report.show(
        f"{name}, {streams} streams: idle share",
        [idle_share(intervals)],
        "",
        None if name == "enforce_eager" else 0.05,
        at_most=True,
        more={
            "in gaps over 5 us": idle_share(intervals, 5.0),
            "ms a step": span / 1e3,
            "unprofiled": 1e3 * unseen,
            "kernels a step": len(intervals) / scale.steps,
        },
    )


# -- start ----------------------------------------------------------------------------------------------------------


def case_start(bench: Bench, scale: Scale = FULL) -> None:
    """LLM(...) on weights that are there already: until it is ready, and until the first token of 128."""
    with random_model(bench, scale) as model:
        ready, first, blocks = [], [], 0
        for turn in bench.turns(bench.rounds + 1):
            begin = time.perf_counter()
            with model.serving(max_num_seqs=max(scale.streams), max_num_batched_tokens=scale.budgets[0]) as llm:
                ready.append(time.perf_counter() - begin)
                generate(llm, scale.requests(1, (scale.single[0], 1), turn), f"start-{turn}")
                first.append(time.perf_counter() - begin)
                blocks = llm.llm_engine.pool.num_blocks
        more = {"first token s": first[0], "blocks": blocks}
        bench.report.show("first of the process: ready", ready[:1], "s", more=more)
        if ready[1:]:
            bench.report.show("another: ready", ready[1:], "s")
            bench.report.show("another: first token", first[1:], "s")
