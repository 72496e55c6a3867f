"""How fast the native kernels are, next to torch's: `python benchmarks/kernels.py [--rounds N]`.

Both sides of a comparison take turns call by call on a machine that may be busy with other things; what is
printed is a low percentile of each side's calls, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels import QuantizedWeight, RowKind, RowLayout, native
from quire.kernels.experts import ExpertWeights
from quire.kernels.quantized_experts import QuantizedExpertWeights

PERCENTILE = 0.1
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
SPREAD = 256_000_000  # bytes of weights, so many that no cache holds them
LINEARS = (
    ("bf16", 2816, 1024, (1, 2, 4, 8, 16, 32, 64, 128, 512)),
    ("bf16", 32000, 1024, (1, 8, 32)),
    ("bf16", 1024, 2816, (1, 8, 32, 128)),
    ("bf16", 4096, 4096, (1, 8, 32, 128)),
    ("bf16", 14336, 4096, (1, 32, 128)),
    ("bf16", 4096, 14336, (1, 32, 128)),
    ("fp32", 2816, 1024, (1, 8, 32, 128)),
    ("fp16", 2816, 1024, (1, 8, 32, 128)),
)
QUANTIZED = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_0", "MXFP4", "INT8_ROWS")
QUANTIZED_SHAPE, QUANTIZED_TOKENS = (2816, 1024), (1, 8, 32, 512)
EXPERTS, CHOSEN, EXPERT_SHAPE = 32, 4, (1536, 2048)  # of a gate and an up
EXPERT_KINDS = ("Q8_0", "Q4_0", "Q4_K", "AFFINE4", "TABLE4")
REPEATS = 2000  # of the calls that are all overhead


def alternate(calls: dict[str, Callable[[int], object]], repeats: int) -> dict[str, float]:
    """Seconds of one call of each kind; a call gets its number, to choose its operands by."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            times[name].append(time.perf_counter() - start)
    return {name: sorted(spent)[int(len(spent) * PERCENTILE)] for name, spent in times.items()}


def linear_table(name: str, rows: int, features: int, tokens: tuple[int, ...], rounds: int) -> None:
    """One shape, with so many weights that no cache holds them: packed, as large models' are, where that is faster."""
    dtype = DTYPES[name]
    size = rows * features * dtype.itemsize
    weights = [(torch.randn(rows, features) * 0.02).to(dtype) for _ in range(max(2, SPREAD // size))]
    served = [native.pack(one.clone()) if native.can_pack(one) else one for one in weights]
    name += " packed" if served[0] is not weights[0] else ""
    for count in tokens:
        x = torch.randn(count, features).to(dtype)

        def ours(i: int, x: torch.Tensor = x) -> object:
            return native.linear(x, (served[i % len(weights)],), (None,))

        def theirs(i: int, x: torch.Tensor = x) -> object:
            return F.linear(x, weights[-1 - i % len(weights)])

        spent = alternate({"quire": ours, "torch": theirs}, max(20, int(rounds * 64 / (1 + count / 8))))
        work, line = 2e-9 * count * rows * features, f"{name}  {rows:6}x{features:<5} {count:4}"
        for side in spent.values():
            line += f"  {work / side:6.0f} GFLOP/s {size / side * 1e-9:5.1f} GB/s"
        print(f"{line}  {spent['torch'] / spent['quire']:5.2f}", flush=True)


def quantized_table(kind: RowKind, rounds: int) -> None:
    """Products with one kind of quantized rows beside those with bf16 weights of the same shape."""
    rows, features = QUANTIZED_SHAPE
    layout, size = RowLayout(kind, features), rows * features * 2
    # Small bytes: scales among them are ordinary numbers.
    made = torch.randint(0, 48, (rows, layout.row_bytes), dtype=torch.uint8)
    packed = [QuantizedWeight(made.clone(), layout) for _ in range(max(2, SPREAD // made.numel()))]
    plain = [(torch.randn(rows, features) * 0.02).bfloat16() for _ in range(max(2, SPREAD // size))]
    for count in QUANTIZED_TOKENS:
        x = torch.randn(count, features).bfloat16()

        def bytes_(i: int, x: torch.Tensor = x) -> object:
            return native.quantized_linear(x, (packed[i % len(packed)],), (None,))

        def elements(i: int, x: torch.Tensor = x) -> object:
            return native.linear(x, (plain[i % len(plain)],), (None,))

        spent = alternate({"packed": bytes_, "bf16": elements}, max(20, int(rounds * 64 / (1 + count / 8))))
        work, line = 2e-9 * count * rows * features, f"{kind.name:9} {count:4}"
        for name, read in (("packed", made.numel()), ("bf16", size)):
            line += f"  {work / spent[name]:6.0f} GOP/s {read / spent[name] * 1e-9:5.1f} GB/s"
        print(f"{line}  {spent['bf16'] / spent['packed']:5.2f}", flush=True)


def experts_table(kind: RowKind, rounds: int) -> None:
    """Experts of one kind of quantized rows beside those of bf16: each token with some of them, drawn by chance."""
    rows, features = EXPERT_SHAPE
    packed_kind = kind >= RowKind.INT8_ROWS
    layout = RowLayout(kind, features, 32 if packed_kind else 0)
    table = torch.randn(16) if kind is RowKind.TABLE4 else None
    made = torch.randint(0, 48, (EXPERTS, rows, layout.row_bytes), dtype=torch.uint8)
    if packed_kind:
        made[..., : 4 * layout.groups] = torch.full((layout.groups,), 0.01).view(torch.uint8)
    packed = QuantizedExpertWeights([[QuantizedWeight(own, layout, table)] for own in made])
    plain = ExpertWeights([[(torch.randn(rows, features) * 0.02).bfloat16()] for _ in range(EXPERTS)])
    for count in QUANTIZED_TOKENS:
        experts = torch.rand(count, EXPERTS).topk(CHOSEN).indices.int()
        starts, places = torch.empty(EXPERTS + 1, dtype=torch.int32), torch.empty_like(experts)
        tokens = torch.empty(count * CHOSEN, dtype=torch.int64)
        native.sort_by_expert(experts, starts, tokens, places)
        x = torch.randn(count, features).bfloat16()[tokens]

        def bytes_(i: int, x: torch.Tensor = x, starts: torch.Tensor = starts, own: torch.Tensor = tokens) -> object:
            return native.quantized_grouped_linear(x, starts, own, packed)

        def elements(i: int, x: torch.Tensor = x, starts: torch.Tensor = starts, own: torch.Tensor = tokens) -> object:
            return native.grouped_linear(x, starts, own, plain)

        spent = alternate({"packed": bytes_, "bf16": elements}, max(10, int(rounds * 16 / (1 + count / 8))))
        read = len(experts.unique()) * rows
        work, line = 2e-9 * count * CHOSEN * rows * features, f"{kind.name:9} {count:4}"
        for name, size in (("packed", layout.row_bytes), ("bf16", 2 * features)):
            line += f"  {work / spent[name]:6.0f} GOP/s {read * size / spent[name] * 1e-9:5.1f} GB/s"
        print(f"{line}  {spent['bf16'] / spent['packed']:5.2f}", flush=True)


def pool_table(rounds: int) -> None:
    """torch's product and ours in turns against each alone: near 1 where both run on the same threads."""
    x, big = torch.randn(8, 1024).bfloat16(), torch.randn(256, 512)
    weights = [torch.randn(2816, 1024).bfloat16() for _ in range(32)]

    def ours(i: int) -> object:
        return native.linear(x, (weights[i % 32],), (None,))

    def theirs(i: int) -> object:
        return big @ big.T

    repeats = 64 * rounds
    both: dict[str, Callable[[int], object]] = {"ours": ours, "theirs": theirs}
    alone = sum(alternate({name: call}, repeats)[name] for name, call in both.items())
    turns = sum(alternate(both, repeats).values())
    spent = f"in turns {turns * 1e6:.0f} us, apart {alone * 1e6:.0f} us"
    print(f"{native.thread_pool()}: {spent}, ratio {turns / alone:.2f}")


def overhead_table() -> None:
    """Microseconds of a call so small that it is all overhead."""
    x, weight, key = (torch.randn(*shape).bfloat16() for shape in ((1, 64), (64,), (1, 1, 64)))
    matrix, positions = torch.randn(8, 64).bfloat16(), torch.zeros(1, dtype=torch.long)
    cos_sin, keys = torch.randn(4, 64), torch.zeros(2, 1, 16, 64).bfloat16()
    calls: dict[str, Callable[[int], object]] = {
        "linear, 1 weight": lambda i: native.linear(x, (matrix,), (None,)),
        "linear, 3 weights": lambda i: native.linear(x, (matrix,) * 3, (None,) * 3),
        "rms_norm": lambda i: native.rms_norm(x, weight, 1e-5),
        "rotary": lambda i: native.rotary(key, key, positions, cos_sin),
        "activation_and_mul": lambda i: native.activation_and_mul(x, "silu"),
        "write_kv": lambda i: native.write_kv(key, key, keys, keys, positions),
        "torch.empty": lambda i: torch.empty((1, 64), dtype=torch.bfloat16),
    }
    for name, seconds in alternate(calls, REPEATS).items():
        print(f"{name:20} {seconds * 1e6:5.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="more gives steadier figures")
    parser.add_argument("--only", choices=["linear"], help="that table alone, and of bf16")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    print(f"{native.isa()}, {native.num_threads()} threads, {native.thread_pool()}")
    if not arguments.only:
        overhead_table()
        pool_table(rounds)
    print("weight, tokens, quire, torch, torch's time by quire's")
    for name, rows, features, tokens in LINEARS:
        if name == "bf16" or not arguments.only:
            linear_table(name, rows, features, tokens, rounds)
    if arguments.only:
        return
    print(f"quantized rows {QUANTIZED_SHAPE}, tokens, quantized, bf16, bf16's time by the quantized one's")
    for kind in QUANTIZED:
        quantized_table(RowKind[kind], rounds)
    print(f"{CHOSEN} of {EXPERTS} experts {EXPERT_SHAPE} a token, tokens, quantized, bf16, bf16's time by the other's")
    for kind in EXPERT_KINDS:
        experts_table(RowKind[kind], rounds)


if __name__ == "__main__":
    main()
