"""What only a GPU can show of the kernels: its own arithmetic keeps the promise, at sizes of real models."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights
from quire.kernels.experts import ExpertWeights, Routing

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=GPU, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("features", "rows"), [(4096, 6144), (14336, 4096), (4096, 128256)])
def test_a_token_alone_and_among_others(features: int, rows: int, dtype: torch.dtype) -> None:
    """The matrix unit must give an element the same bits in any column, beside any others."""
    x, weight = randn(600, features, dtype=dtype), randn(rows, features, dtype=dtype) / features**0.5
    exact = x[:3].double() @ weight.double().t()
    alone = [kernels.linear(x[i : i + 1], [weight], [None], torch.float32) for i in range(3)]
    assert (torch.cat(alone).double() - exact).abs().max() < 1e-2
    for count in (3, 8, 9, 17, 33, 64, 65, 130, 257, 600):
        together = kernels.linear(x[:count], [weight], [None], torch.float32)
        for i in range(3):
            assert torch.equal(together[i : i + 1], alone[i]), count


@pytest.mark.parametrize("rank", [8, 16, 64])
def test_an_adapter_alone_and_among_others(rank: int) -> None:
    features, rows = 4096, 6144
    weight, table = randn(rows, features) / 64, LoraTable(features, rows, torch.bfloat16, 16, GPU, row_major=True)
    for slot in range(16):
        own = rank if slot % 2 else 8
        table.put(slot, LoraWeights(randn(own, features) / 64, randn(rows, own), 0.5, row_major=True))
    x = randn(300, features)

    def run(rows_: torch.Tensor, segments: list[tuple[int, int, int, float]]) -> torch.Tensor:
        return kernels.linear(rows_, [weight], [None], None, [table], LoraSegments.of(segments, len(rows_), GPU))

    crowd = run(x, [(i, i + 1, i % 16, 1.0) for i in range(100)] + [(100, 300, 3, 1.0)])
    for i in (0, 7, 99):
        assert torch.equal(crowd[i : i + 1], run(x[i : i + 1], [(0, 1, i % 16, 1.0)]))
    assert torch.equal(crowd[250:251], run(x[250:251], [(0, 1, 3, 1.0)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "chosen", "features", "rows"), [(8, 2, 4096, 7168), (128, 8, 2048, 768)])
def test_a_tokens_experts_alone_and_in_a_crowd(
    count: int, chosen: int, features: int, rows: int, dtype: torch.dtype
) -> None:
    weights = ExpertWeights([[randn(rows, features, dtype=dtype) / features**0.5 for _ in "ab"] for _ in range(count)])
    x, logits = randn(700, features, dtype=dtype), randn(700, count, dtype=torch.float32)
    table = LoraTable(features, rows, dtype, 2, GPU, row_major=True)
    for slot in range(2):
        own = randn(8 + slot, features, dtype=dtype) / 64, randn(rows, 8 + slot, dtype=dtype)
        table.put(slot, LoraWeights(*own, 0.5, row_major=True))
    tables = [[table, None] if expert % 3 else [None, table] for expert in range(count)]

    def run(first: int, end: int, adapted: bool) -> torch.Tensor:
        tokens = end - first
        numbers = [torch.full((tokens, chosen), -1, dtype=torch.int32, device=GPU) for _ in range(2)]
        shares = torch.empty((tokens, chosen), device=GPU)
        kernels.route(logits[first:end], numbers[0], shares, Routing(renormalise=True))
        starts = torch.empty(count + 1, dtype=torch.int32, device=GPU)
        places = torch.empty(tokens * chosen, dtype=torch.int64, device=GPU)
        kernels.sort_by_expert(numbers[0], starts, places, numbers[1])
        segments = LoraSegments.of(
            [(t, t + 1, (first + t) % 2, 1.0) for t in range(tokens) if (first + t) % 3], tokens, GPU
        )
        given = (tables, segments) if adapted else ()
        made = kernels.grouped_linear(kernels.embedding(places, x[first:end]), starts, places, weights, *given)
        return kernels.combine(made, numbers[1], shares)

    best = logits[:3].softmax(-1).topk(chosen)
    exact = torch.zeros(3, 2 * rows, dtype=torch.float64, device=GPU)
    for t in range(3):
        for share, expert in zip(best.values[t] / best.values[t].sum(), best.indices[t].tolist(), strict=True):
            products = [(weight.double() @ x[t].double()).to(dtype).double() for weight in weights.weights[expert]]
            exact[t] += share * torch.cat(products)
    for adapted in (False, True):
        crowd = run(0, 700, adapted)
        assert not crowd.isnan().any()
        if not adapted:
            assert (crowd[:3].double() - exact).abs().max() < (1e-4 if dtype is torch.float32 else 0.05)
            base = crowd
        for first, end in ((0, 1), (1, 2), (699, 700), (3, 12), (100, 140), (200, 400), (10, 690)):
            assert torch.equal(run(first, end, adapted), crowd[first:end]), (first, end)
    changed = (crowd != base).any(1)
    assert torch.equal(changed, (torch.arange(700, device=GPU) % 3).bool())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (8, 4, 256)])
def test_attention_alone_in_chunks_and_in_a_crowd(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    length, size = 1300, 8
    blocks = -(-length // size)
    pools = [randn(4 * blocks, kv_heads, size, dim, dtype=dtype) for _ in range(2)]
    table = torch.randperm(4 * blocks, device=GPU)[:blocks].to(torch.int32).unsqueeze(0)
    query = randn(length, heads, dim, dtype=dtype)

    def run(first: int, end: int) -> torch.Tensor:
        starts = torch.tensor([0, end - first], dtype=torch.int32, device=GPU)
        return kernels.paged_attention(
            query[first:end], *pools, table, starts, torch.tensor([end], dtype=torch.int32, device=GPU), dim**-0.5
        )

    whole = run(0, length)
    assert not whole.isnan().any()
    for first, end in ((0, 1), (511, 512), (512, 513), (1299, 1300), (1, 700), (640, 1300)):
        assert torch.equal(run(first, end), whole[first:end]), (first, end)


def test_great_values_of_later_tokens_change_nothing() -> None:
    """A weight of zero times a great value must not shift what the matrix unit adds to."""
    dim, size, length = 128, 16, 64
    keys, values = randn(4, 1, size, dim), randn(4, 1, size, dim)
    values[3] = 3e38
    table = torch.arange(4, dtype=torch.int32, device=GPU).unsqueeze(0)
    query = randn(length, 4, dim)

    def run(end: int) -> torch.Tensor:
        starts, lengths = (torch.tensor(n, dtype=torch.int32, device=GPU) for n in ([0, end], [end]))
        return kernels.paged_attention(query[:end], keys, values, table, starts, lengths, dim**-0.5)

    assert torch.equal(run(length)[:40], run(40))


def test_blocks_go_and_come_back() -> None:
    from quire.kernels import cuda

    caches = [randn(20, 2, 8, 64) for _ in range(4)]
    before = [cache.clone() for cache in caches]
    addresses = torch.tensor([cache.data_ptr() for cache in caches], device=GPU)
    block_bytes = caches[0][0].numel() * 2
    blocks = torch.tensor([3, 7, 19], device=GPU)
    packed = torch.empty((3, 4, block_bytes), dtype=torch.uint8, device=GPU)
    cuda.gather_blocks(addresses, 20, block_bytes, blocks, packed)
    cuda.scatter_blocks(addresses, 20, block_bytes, torch.tensor([0, 1, 2], device=GPU), packed)
    cuda.copy_blocks(addresses, 20, block_bytes, torch.tensor([5], device=GPU), torch.tensor([6], device=GPU))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:3], old[blocks]) and torch.equal(cache[6], old[5])
        assert torch.equal(cache[7:], old[7:])
