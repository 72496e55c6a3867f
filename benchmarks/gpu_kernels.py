"""The kernels of `gpu.py`: attention, matrix products and adapters, at the shapes of Llama 3 8B.

Operands change from call to call, and are together more than the second-level cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from gpu_device import Bench

from quire import kernels
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, pack

_SPREAD = 512 << 20  # bytes of operands that no cache holds
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Product:
    """A product of the model: weights of so many rows each, side by side, of one number of in-features."""

    name: str
    rows: tuple[int, ...]
    features: int

    @property
    def size(self) -> int:
        return sum(self.rows) * self.features * _DTYPE.itemsize

    def copies(self, spread: int) -> int:
        return max(2, -(-spread // self.size))

    def make(self, device: torch.device, copies: int) -> list[torch.Tensor]:
        shape = sum(self.rows), self.features
        return [torch.empty(shape, dtype=_DTYPE, device=device).normal_(std=0.02) for _ in range(copies)]


QKV = Product("qkv 6144x4096", (4096, 1024, 1024), 4096)
OUT = Product("o 4096x4096", (4096,), 4096)
GATE_UP = Product("gate_up 28672x4096", (14336, 14336), 4096)
DOWN = Product("down 4096x14336", (4096,), 14336)
HEAD = Product("lm_head 128256x4096", (128256,), 4096)
LAYER = (QKV, OUT, GATE_UP, DOWN)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)


@dataclass(frozen=True)
class Heads:
    query: int = 32
    kv: int = 8
    dim: int = 128


HEADS = Heads()


@dataclass(frozen=True)
class Attention:
    """Calls for the last `own` tokens of `streams` sequences with `context` tokens each, and what one of them does.

    There are `calls` different ones, each on sequences of its own. size: bytes of keys and values that a call reads.
    """

    call: Callable[[int], torch.Tensor]
    calls: int
    size: int
    flops: int


def attention(
    heads: Heads, streams: int, own: int, context: int, block: int, device: torch.device, spread: int = _SPREAD
) -> Attention:
    size = 2 * streams * context * heads.kv * heads.dim * _DTYPE.itemsize
    calls = max(1, -(-spread // size))
    width = -(-context // block)
    shape = calls * streams * width, heads.kv, block, heads.dim
    keys, values = (torch.empty(shape, dtype=_DTYPE, device=device).normal_() for _ in range(2))
    tables = torch.randperm(shape[0], device=device).int().view(calls, streams, width)
    query = torch.empty((streams * own, heads.query, heads.dim), dtype=_DTYPE, device=device).normal_()
    start = torch.arange(0, streams * own + 1, own, dtype=torch.int32, device=device)
    length = torch.full((streams,), context, dtype=torch.int32, device=device)

    def call(number: int) -> torch.Tensor:
        return kernels.paged_attention(query, keys, values, tables[number], start, length, heads.dim**-0.5)

    pairs = own * (context - own) + own * (own + 1) // 2
    return Attention(call, calls, size, 4 * streams * heads.query * heads.dim * pairs)


def case_attention(bench: Bench, heads: Heads = HEADS, shrink: int = 1, spread: int = _SPREAD) -> None:
    """Paged attention: decode as bytes of keys and values of what a copy moves; chunks as FLOPs of the matrix peak."""
    report, roofs, context = bench.report, bench.roofs, 8192 // shrink
    for streams in (16,) if bench.quick else (1, 16, 64):
        for block in (8, 16):
            what = f"decode, {streams} streams at {context}, blocks of {block}"
            with report.trying(what):
                bench.check_time()
                work = attention(heads, streams, 1, context, block, bench.device, spread)
                spent = bench.clock({"": (work.call, work.calls)})[""]
                shares = [work.size / one / roofs.copy for one in spent]
                rate = work.size / median(spent) / 1e9
                report.show(what, shares, "of copy", 0.85, more={"us": 1e6 * median(spent), "GB/s": rate})
    for own, length, target in ((4096, 4096, 0.55), (512, 3584, None)):
        for block in (8, 16):
            own_tokens, tokens = own // shrink, length // shrink
            what = f"{own_tokens} tokens at context {tokens}, blocks of {block}"
            with report.trying(what):
                bench.check_time()
                work = attention(heads, 1, own_tokens, tokens, block, bench.device, spread)
                sides = {"quire": (work.call, work.calls)}
                if own == length:
                    sides["sdpa"] = (sdpa(heads, own_tokens, bench.device), 4)
                found = bench.clock(sides)
                shares = [work.flops / one / roofs.matrix for one in found["quire"]]
                took = {name: median(times) for name, times in found.items()}
                more = {"us": 1e6 * took["quire"], "TFLOP/s": work.flops / took["quire"] / 1e12}
                if "sdpa" in took:
                    more["sdpa us"] = 1e6 * took["sdpa"]
                report.show(what, shares, "of peak", target, more=more)


def sdpa(heads: Heads, tokens: int, device: torch.device) -> Callable[[int], torch.Tensor]:
    """torch's attention on contiguous keys, for comparison."""
    shapes = [(1, count, tokens, heads.dim) for count in (heads.query, heads.kv, heads.kv)]
    q, k, v = (torch.empty(shape, dtype=_DTYPE, device=device).normal_() for shape in shapes)
    return lambda number: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def parts(weight: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The weights that lie in one, as the model has them."""
    return weight.split(list(rows))


def case_linear(
    bench: Bench,
    products: Sequence[Product] = (*LAYER, HEAD),
    tokens: Sequence[int] = TOKENS,
    spread: int = _SPREAD,
) -> None:
    """The exact products beside torch's F.linear (cuBLAS): shares of the roofline."""
    if bench.quick:
        tokens = [count for count in tokens if count in (1, 16, 64, 512, 4096)]
    with exact(True, bench.device):
        for product in products:
            weights: list[torch.Tensor] = []  # of the last product: room for these
            weights = product.make(bench.device, product.copies(spread))
            for count in tokens:
                with bench.report.trying(f"{product.name}, T={count}"):
                    bench.check_time()
                    linear_figures(bench, product, weights, count)


def linear_figures(bench: Bench, product: Product, weights: Sequence[torch.Tensor], tokens: int) -> None:
    x = torch.empty((tokens, product.features), dtype=_DTYPE, device=bench.device).normal_()
    lists = [parts(weight, product.rows) for weight in weights]
    none = [None] * len(product.rows)
    spent = bench.clock(
        {
            "quire": (lambda number: kernels.linear(x, lists[number], none), len(weights)),
            "torch": (lambda number: F.linear(x, weights[number]), len(weights)),
        }
    )
    rows = sum(product.rows)
    flops = 2 * tokens * rows * product.features
    size = product.size + tokens * (rows + product.features) * _DTYPE.itemsize
    least = bench.roofs.seconds(flops, size)
    took = {name: median(times) for name, times in spent.items()}
    rate = {"GB/s": size / took["quire"] / 1e9}
    if flops / bench.roofs.matrix > size / bench.roofs.copy:
        rate = {"TFLOP/s": flops / took["quire"] / 1e12}
    more = {
        "us": 1e6 * took["quire"],
        **rate,
        "F.linear us": 1e6 * took["torch"],
        "F.linear / quire": took["torch"] / took["quire"],
        "F.linear of roof": least / took["torch"],
    }
    bench.report.show(f"{product.name}, T={tokens}", [least / one for one in spent["quire"]], "of roof", more=more)


@contextmanager
def exact(wanted: bool, device: torch.device) -> Iterator[None]:
    """Products are batch-invariant inside, or cuBLAS's; on a CPU they always are."""
    if device.type != "cuda":
        yield
        return
    module = kernels.cuda_backend()
    before = module.exact_products()
    module.set_exact_products(wanted)
    try:
        yield
    finally:
        module.set_exact_products(before)


def tables(product: Product, rank: int, adapters: int, device: torch.device) -> list[LoraTable]:
    """One for each weight of a product, with as many adapters of random weights."""
    row_major: bool = kernels.backend_of(torch.empty(0, device=device)).ROW_MAJOR_B
    made = []
    for rows in product.rows:
        table = LoraTable(product.features, rows, _DTYPE, adapters, device, row_major)
        for slot in range(adapters):
            a = torch.empty((rank, product.features), dtype=_DTYPE, device=device).normal_(std=0.02)
            b = torch.empty((rows, rank), dtype=_DTYPE, device=device).normal_(std=0.02)
            table.put(slot, LoraWeights(a, b if row_major else pack(b), 2.0, row_major=row_major))
        made.append(table)
    return made


def segments(tokens: int, adapters: int, device: torch.device) -> LoraSegments:
    """Rows shared out among the adapters, one after the other."""
    ends = [tokens * number // adapters for number in range(adapters + 1)]
    rows = [(ends[slot], ends[slot + 1], slot, 1.0) for slot in range(adapters)]
    return LoraSegments.of(rows, tokens, device)


def case_lora(
    bench: Bench,
    products: Sequence[Product] = LAYER,
    ranks: Sequence[int] = (16, 64),
    adapters: Sequence[int] = (1, 8, 64),
    tokens: Sequence[int] = (1, 64, 512),
    spread: int = _SPREAD // 2,
) -> None:
    """What adapters on all products of a layer add to their time, as a share of it."""
    with exact(True, bench.device):
        for rank in ranks:
            for number in adapters:
                fitting = [count for count in tokens if count >= number]
                with bench.report.trying(f"r{rank}, {number} adapters"):
                    lora_figures(bench, products, rank, number, fitting, spread)


def lora_calls(
    x: torch.Tensor, weights: Sequence[Sequence[torch.Tensor]], shares: Sequence[list[LoraTable]], owners: LoraSegments
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """The product by itself, and with what adapters add."""
    none = [None] * len(weights[0])
    return (
        lambda number: kernels.linear(x, weights[number], none),
        lambda number: kernels.linear(x, weights[number], none, None, shares[number], owners),
    )


def lora_figures(
    bench: Bench, products: Sequence[Product], rank: int, adapters: int, tokens: Sequence[int], spread: int
) -> None:
    spent: dict[int, dict[str, dict[str, float]]] = {count: {} for count in tokens}
    for product in products:
        bench.check_time()
        copies = product.copies(spread)
        lists = [parts(weight, product.rows) for weight in product.make(bench.device, copies)]
        shares = [tables(product, rank, adapters, bench.device) for _ in range(copies)]
        for count in tokens:
            x = torch.empty((count, product.features), dtype=_DTYPE, device=bench.device).normal_()
            owners = segments(count, adapters, bench.device)

            base, adapted = lora_calls(x, lists, shares, owners)
            found = bench.clock({"base": (base, copies), "lora": (adapted, copies)})
            spent[count][product.name] = {name: median(times) for name, times in found.items()}
    for count, by_product in spent.items():
        whole = {side: sum(times[side] for times in by_product.values()) for side in ("base", "lora")}
        bench.report.show(
            f"r{rank}, {adapters} adapters, T={count}: all / base - 1",
            [whole["lora"] / whole["base"] - 1],
            more={
                "us": 1e6 * (whole["lora"] - whole["base"]),
                **{name.split()[0]: times["lora"] / times["base"] - 1 for name, times in by_product.items()},
            },
        )
