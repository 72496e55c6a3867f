"""Paged attention: how near a decode step comes to the memory's read rate, prefill and encoders beside SDPA, windows.

python benchmarks/attention.py [--rounds 30] [--one-thread]

Candidates take turns and the best round of each counts, so that a busy machine slows all alike. On one too
busy for several threads to run side by side, --one-thread measures one thread, by its own CPU time.
GB/s counts keys and values once; the read rate is the better of two torch reductions' in the same rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from quire import huge_pages, kernels
from quire.kernels import native

SHAPES = [(16, 8, 64), (32, 8, 128), (16, 16, 64), (14, 2, 64)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
STREAMS, CONTEXT, BLOCK = 16, 3500, 16
WINDOW, WINDOW_CONTEXT, CHUNK = 512, 4096, 512
TEXTS, SHORTEST, LONGEST = 64, 16, 256  # tokens of an encoder's texts
ENCODERS = [(12, 12, 32), (12, 12, 64)]
BUFFER = 1 << 26  # float32 numbers, which no cache holds


def best_of(candidates: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The shortest time of each candidate, in seconds; the candidates take turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            begin = clock()
            run()
            best[name] = min(best[name], clock() - begin)
    return best


def pool(blocks: torch.Tensor) -> torch.Tensor:
    """The same in such memory as the engine's pool has."""
    return huge_pages.allocate(blocks.nbytes).view(blocks.dtype).view(blocks.shape).copy_(blocks)


def attention_call(
    shape: tuple[int, int, int], dtype: torch.dtype, streams: int, own: int, context: int, window: int = 0
) -> tuple[Callable[[], torch.Tensor], int]:
    """A call that computes the last `own` tokens of `streams` sequences, and the bytes of cache it reads."""
    heads, kv_heads, dim = shape
    per_stream = -(-context // BLOCK)
    blocks = streams * per_stream
    keys, values = (pool(torch.randn(blocks, kv_heads, BLOCK, dim).to(dtype)) for _ in range(2))
    table = torch.randperm(blocks).view(streams, per_stream).int()
    query = torch.randn(streams * own, heads, dim).to(dtype)
    start = torch.arange(0, streams * own + 1, own, dtype=torch.int32)
    length = torch.full((streams,), context, dtype=torch.int32)

    def run() -> torch.Tensor:
        return kernels.paged_attention(query, keys, values, table, start, length, dim**-0.5, window)

    return run, 2 * streams * context * kv_heads * dim * dtype.itemsize


def sdpa_call(shape: tuple[int, int, int], dtype: torch.dtype, tokens: int) -> Callable[[], torch.Tensor]:
    heads, kv_heads, dim = shape
    q = torch.randn(1, heads, tokens, dim).to(dtype)
    k, v = (torch.randn(1, kv_heads, tokens, dim).to(dtype) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)


def decode_table(rounds: int, clock: Callable[[], float]) -> None:
    print(f"\nDecode: {STREAMS} streams, {CONTEXT} tokens of context, blocks of {BLOCK}")
    print(f"{'H,G,D':>10} {'dtype':>9} {'ms':>8} {'GB/s':>7} {'read rate':>10} {'share':>6}")
    buffer = torch.ones(BUFFER)
    row = torch.ones(1 << 12)
    for shape in SHAPES:
        for dtype in DTYPES:
            run, size = attention_call(shape, dtype, STREAMS, 1, CONTEXT)
            matrix = buffer.view(-1, 1 << 12)
            times = best_of({"quire": run, "sum": buffer.sum, "mv": partial(torch.mv, matrix, row)}, rounds, clock)
            rate = size / times["quire"] / 1e9
            memory = buffer.numel() * 4 / min(times["sum"], times["mv"]) / 1e9
            name, kind = ",".join(map(str, shape)), str(dtype)[6:]
            took = times["quire"] * 1e3
            print(f"{name:>10} {kind:>9} {took:8.2f} {rate:7.1f} {memory:10.1f} {rate / memory:6.0%}")


def prefill_table(rounds: int, tokens: int, clock: Callable[[], float]) -> None:
    print(f"\nPrefill: one chunk of {tokens} tokens from position 0")
    print(f"{'H,G,D':>10} {'dtype':>9} {'quire ms':>9} {'GFLOP/s':>8} {'SDPA ms':>8} {'SDPA / quire':>12}")
    for shape in SHAPES:
        for dtype in DTYPES:
            run, _ = attention_call(shape, dtype, 1, tokens, tokens)
            times = best_of({"quire": run, "sdpa": sdpa_call(shape, dtype, tokens)}, rounds, clock)
            flops = 2 * shape[0] * shape[2] * tokens * (tokens + 1)
            name, kind = ",".join(map(str, shape)), str(dtype)[6:]
            print(
                f"{name:>10} {kind:>9} {times['quire'] * 1e3:9.2f} {flops / times['quire'] / 1e9:8.0f} "
                f"{times['sdpa'] * 1e3:8.2f} {times['sdpa'] / times['quire']:12.1f}"
            )


def encoder_calls(
    shape: tuple[int, int, int], dtype: torch.dtype, texts: int
) -> tuple[Callable[[], object], Callable[[], object], int]:
    """One call in which all tokens of a text see each other, SDPA of one after the other, and how many products."""
    heads, _, dim = shape
    lengths = torch.linspace(SHORTEST, LONGEST, texts).int()[torch.randperm(texts)]
    blocks = -(-lengths // BLOCK)
    keys, values = (pool(torch.randn(int(blocks.sum()), heads, BLOCK, dim).to(dtype)) for _ in range(2))
    table = torch.zeros(texts, int(blocks.max()), dtype=torch.int32)
    for row, count, end in zip(table, blocks.tolist(), blocks.cumsum(0).tolist(), strict=True):
        row[:count] = torch.arange(end - count, end)
    query = torch.randn(int(lengths.sum()), heads, dim).to(dtype)
    start = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    visible_end = lengths.repeat_interleave(lengths.long())
    inputs = [torch.randn(3, 1, heads, length, dim).to(dtype).unbind() for length in lengths.tolist()]

    def run() -> torch.Tensor:
        return kernels.paged_attention(query, keys, values, table, start, lengths, dim**-0.5, visible_end=visible_end)

    def sdpa() -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(*qkv) for qkv in inputs]

    return run, sdpa, 2 * heads * dim * int(lengths.long().square().sum())


def encoder_table(rounds: int, clock: Callable[[], float]) -> None:
    print(f"\nEncoders: {TEXTS} texts of {SHORTEST} to {LONGEST} tokens, all of which see each other")
    print(f"{'H,G,D':>10} {'dtype':>9} {'quire ms':>9} {'GFLOP/s':>8} {'SDPA ms':>8} {'SDPA / quire':>12}")
    for shape in ENCODERS:
        for dtype in DTYPES[:2]:
            run, sdpa, products = encoder_calls(shape, dtype, TEXTS)
            times = best_of({"quire": run, "sdpa": sdpa}, rounds, clock)
            print(
                f"{','.join(map(str, shape)):>10} {str(dtype)[6:]:>9} {times['quire'] * 1e3:9.2f} "
                f"{2 * products / times['quire'] / 1e9:8.0f} {times['sdpa'] * 1e3:8.2f} "
                f"{times['sdpa'] / times['quire']:12.1f}"
            )


def window_table(rounds: int, clock: Callable[[], float]) -> None:
    print(
        f"\nA window of {WINDOW} at {WINDOW_CONTEXT} tokens, beside all of them: {STREAMS} streams, a chunk of {CHUNK}"
    )
    print(
        f"{'H,G,D':>10} {'dtype':>9} {'decode ms':>10} {'all':>8} {'share':>6} {'prefill':>11} {'all':>8} {'share':>6}"
    )
    for shape in SHAPES:
        for dtype in DTYPES:
            texts = []
            for streams, own in ((STREAMS, 1), (1, CHUNK)):
                runs = {
                    str(window): attention_call(shape, dtype, streams, own, WINDOW_CONTEXT, window)[0]
                    for window in (WINDOW, 0)
                }
                part, whole = best_of(runs, rounds, clock).values()
                texts.append(f"{part * 1e3:{10 if own == 1 else 11}.2f} {whole * 1e3:8.2f} {part / whole:6.0%}")
            print(f"{','.join(map(str, shape)):>10} {str(dtype)[6:]:>9} {' '.join(texts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--one-thread", action="store_true")
    arguments = parser.parse_args()
    clock = time.perf_counter
    if arguments.one_thread:
        torch.set_num_threads(1)
        clock = time.thread_time
    torch.manual_seed(0)
    print(f"{native.isa()}, {native.num_threads()} threads ({native.thread_pool()}), torch {torch.__version__}")
    decode_table(arguments.rounds, clock)
    prefill_table(arguments.rounds, arguments.tokens, clock)
    encoder_table(arguments.rounds, clock)
    window_table(arguments.rounds, clock)


if __name__ == "__main__":
    main()
