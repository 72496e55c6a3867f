"""The kernels of experts: routing against torch, products against `linear`; a row's bits are its own."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from kernel_helpers import ROUNDING, assert_close, is_gpu, misaligned, randn, same_bits, strided_rows, wide_rows
from linear_cases import F32, exact_linear, lora_weights

from quire.kernels import reference
from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.experts import ExpertWeights, Routing, expert_segments

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a GPU's kernels keep between their launches start as NaN, or as segments of all rows."""
    segment = torch.tensor([0, 1 << 40, 0, 0x3FF0000000000000]).view(torch.uint8)

    def empty(shape: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else shape
        if dtype is not torch.uint8:
            return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, **options)
        count = math.prod(shape)
        return segment.repeat(-(-count // 32))[:count].view(shape).to(**options)

    monkeypatch.setattr(torch, "empty", empty)


def routed(
    kernels: Any, logits: torch.Tensor, chosen: int, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    experts = torch.full((len(logits), chosen), -77, dtype=torch.int32)
    weights = torch.full((len(logits), chosen), torch.nan)
    kernels.route(logits, experts, weights, routing, bias)
    return experts.long(), weights


def wanted_route(
    logits: torch.Tensor, chosen: int, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, for logits without equals."""
    wide = logits.double()
    scores = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid()}.get(routing.scores, wide)
    keys = scores if bias is None else scores + bias.double()
    if routing.groups > 1:
        grouped = keys.view(len(keys), routing.groups, keys.shape[1] // routing.groups)
        best = grouped.topk(routing.group_best, -1).values.sum(-1).topk(routing.top_groups).indices
        kept = torch.zeros(len(keys), routing.groups).scatter_(1, best, 1).bool()
        keys = keys.masked_fill(~kept.repeat_interleave(grouped.shape[-1], 1), -torch.inf)
    experts = keys.topk(chosen).indices
    weights = scores.gather(1, experts)
    if routing.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif routing.scores == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.added).clamp(min=routing.least)
    return experts, weights * routing.scale


ROUTINGS = [
    Routing(), Routing(renormalise=True), Routing("softmax_of_chosen"), Routing("sigmoid"),
    Routing("sigmoid_of_chosen"), Routing("sigmoid", renormalise=True, added=1e-20, scale=2.5),
    Routing("softmax", groups=4, top_groups=2, scale=16.0), Routing(renormalise=True, least=0.75),
    Routing("sigmoid", groups=4, top_groups=2, group_best=2, renormalise=True, added=1e-20, scale=2.5),
]  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("experts", [8, 60, 128])
def test_tokens_are_routed(kernels: Any, routing: Routing, experts: int) -> None:
    for tokens, chosen in [(0, 2), (1, 1), (37, 2), (5, 4)]:
        logits = strided_rows(randn(tokens, experts, dtype=F32, seed=tokens) * 2)
        for bias in (None, randn(experts, dtype=F32, seed=9) * 0.1):
            found, weights = routed(kernels, logits, chosen, routing, bias)
            wanted, exact = wanted_route(logits, chosen, routing, bias)
            assert torch.equal(found, wanted)
            assert_close(weights, exact, exact.abs() * 2e-6)
            for i in range(0, tokens, 7):
                alone = routed(kernels, logits[i : i + 1], chosen, routing, bias)
                assert torch.equal(alone[0], found[i : i + 1]) and same_bits(alone[1], weights[i : i + 1])


def test_of_equals_the_lower_number_is_chosen(kernels: Any) -> None:
    logits = torch.zeros(2, 20)
    logits[1, [4, 11, 17]] = 1.0
    for routing in (*ROUTINGS[:6], Routing("sparse_mixer", tolerance=0.02)):
        found, _ = routed(kernels, logits, 2, routing)
        assert found.tolist() == [[0, 1], [4, 11]]
    found, _ = routed(kernels, logits, 6, Routing(groups=4, top_groups=2))
    assert found.tolist() == [[0, 1, 2, 3, 4, 5], [4, 11, 0, 1, 2, 3]]


def test_whatever_the_logits_experts_exist_and_differ(kernels: Any) -> None:
    for fill in (torch.nan, torch.inf, -torch.inf, 3e38):
        logits = randn(3, 12, dtype=F32)
        logits[1], logits[2, 5:] = fill, fill
        for routing in (*ROUTINGS, Routing("sparse_mixer", tolerance=0.02)):
            found, _ = routed(kernels, logits, 4, routing)
            assert 0 <= int(found.min()) <= int(found.max()) < 12
            assert all(len(set(row)) == 4 for row in found.tolist())


def test_the_sparse_mixer_is_transformers(kernels: Any) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = randn(200, 16, dtype=F32, seed=4)
    logits[100:] *= 0.02  # near to each other
    weights, experts = sparsemixer(logits, 0.01, False)
    found, own_weights = routed(kernels, logits, 2, Routing("sparse_mixer", tolerance=0.02))
    assert torch.equal(found, experts)
    assert_close(own_weights, weights.double(), 1e-6)


def sorted_rows(kernels: Any, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = torch.full((count + 1,), -77, dtype=torch.int32)
    tokens = torch.full((experts.numel(),), -77, dtype=torch.int64)
    places = torch.full(experts.shape, -77, dtype=torch.int32)
    kernels.sort_by_expert(experts, starts, tokens, places)
    return starts, tokens, places


def choices(tokens: int, chosen: int, count: int, seed: int = 0) -> torch.Tensor:
    """Some experts for each token, unevenly; [tokens, chosen] int32."""
    noise = torch.rand(tokens, count, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, count + 1)
    return noise.topk(chosen).indices.int()


def test_rows_are_sorted_by_expert_and_token(kernels: Any) -> None:
    for tokens, chosen, count in [(0, 2, 4), (1, 1, 1), (50, 3, 8), (7, 8, 60), (400, 5, 9), (40, 2, 300)]:
        experts = choices(tokens, chosen, count)
        starts, rows, places = sorted_rows(kernels, experts, count)
        for e in range(count):
            own_rows = (experts == e).nonzero()
            assert rows[starts[e] : starts[e + 1]].tolist() == own_rows[:, 0].tolist()
            assert places[own_rows[:, 0], own_rows[:, 1]].tolist() == list(range(starts[e], starts[e + 1]))
        assert starts[-1] == tokens * chosen


def layer(count: int, features: int, widths: list[int], dtype: torch.dtype) -> ExpertWeights:
    """Every second weight has a bias."""
    weights = [[randn(n, features, dtype=dtype, seed=100 * e + n) for n in widths] for e in range(count)]
    biases = [[randn(n, dtype=dtype, seed=7 * e + n) if i % 2 else None for i, n in enumerate(widths)]
              for e in range(count)]  # fmt: skip
    return ExpertWeights(weights, biases)


SHAPES = [(4, 1, [1]), (3, 33, [32, 5]), (8, 96, [65, 65]), (2, 136, [160, 16]), (60, 40, [48, 48])]


def check_products(kernels: Any, weights: ExpertWeights, x: torch.Tensor, starts: torch.Tensor, rows: Any) -> None:
    """Each expert's rows are what `linear` makes of them, and near to float64."""
    got = kernels.grouped_linear(x, starts, rows, weights)
    assert got.shape == (len(x), weights.out_features)
    for e, (first, end) in enumerate(pairwise(starts.tolist())):
        part, operands = x[first:end], (weights.weights[e], weights.biases[e])
        if first < end:
            assert same_bits(got[first:end], kernels.linear(part, *operands))
        assert_close(got[first:end], *exact_linear(part, *operands))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_linears(kernels: Any, dtype: torch.dtype, shape: Any) -> None:
    count, features, widths = shape
    weights = layer(count, features, widths, dtype)
    for tokens, chosen in [(0, 1), (1, 1), (1, 2), (9, 2), (70 if is_gpu(kernels) else 200, 2)]:
        starts, rows, _ = sorted_rows(kernels, choices(tokens, chosen, count, tokens), count)
        check_products(kernels, weights, strided_rows(randn(tokens, features, dtype=dtype)[rows]), starts, rows)


# What a GPU takes 16 bytes at a time, for as many rows an expert as each of its tiles is made for; most in one.
ROWS = [[1, 0, 0], [0, 9, 0], [5, 0, 19], [1, 40, 0], [66, 3, 40], [9, 150, 0]]


@pytest.mark.parametrize("own", ROWS, ids=str)
def test_tiles_of_any_number_of_rows(kernels: Any, dtype: torch.dtype, own: list[int]) -> None:
    weights = layer(3, 136, [150, 16], dtype)
    starts = torch.tensor([0, *own]).cumsum(0).int()
    rows = torch.cat([torch.arange(n) for n in own])
    check_products(kernels, weights, wide_rows(randn(len(rows), 136, dtype=dtype)), starts, rows)


def test_more_experts_and_weights_than_are_looked_at_together(kernels: Any, dtype: torch.dtype) -> None:
    for count, widths in ((300, [8]), (2, [8, 3, 1, 16, 8, 40, 5, 8, 9, 1])):
        starts, rows, _ = sorted_rows(kernels, choices(20, 2, count, 1), count)
        check_products(kernels, layer(count, 16, widths, dtype), randn(40, 16, dtype=dtype), starts, rows)


def test_parts_of_many_features(kernels: Any) -> None:
    weights, starts = layer(2, 2080, [40], BF16), torch.tensor([0, 3, 12], dtype=torch.int32)
    check_products(kernels, weights, randn(12, 2080, dtype=BF16), starts, torch.arange(12))


def test_weights_at_any_address(kernels: Any) -> None:
    weights = ExpertWeights([[misaligned(randn(24, 64, dtype=BF16, seed=e))] for e in range(2)])
    assert not weights.aligned
    for many in (3, 40):
        starts = torch.tensor([0, many, many + 2], dtype=torch.int32)
        check_products(kernels, weights, randn(many + 2, 64, dtype=BF16), starts, torch.arange(many + 2))


@pytest.mark.parametrize("own", [[1, 4], [0, 13], [20, 14], [70, 1], [5, 140]], ids=str)
def test_any_order_of_warps_and_copies(cuda: Any, order: int, own: list[int]) -> None:
    weights = layer(2, 264, [130], BF16)
    starts = torch.tensor([0, *own]).cumsum(0).int()
    rows = torch.cat([torch.arange(n) for n in own])
    check_products(cuda, weights, randn(len(rows), 264, dtype=BF16), starts, rows)
    tables = tables_for(cuda, weights, without=(2, 1))
    segments = LoraSegments.of([(0, 4, 1, 1.0), (4, 4, 0, 1.0), (5, 90, 0, 0.5), (5, 90, 1, 0.5)], 140)
    got = cuda.grouped_linear(x := randn(len(rows), 264, dtype=BF16), starts, rows, weights, tables, segments)
    for e, (first, end) in enumerate(pairwise(starts.tolist())):
        mine = expert_segments(segments, rows[first:end])
        wanted = cuda.linear(x[first:end], weights.weights[e], weights.biases[e], None, tables[e], mine)
        assert same_bits(got[first:end], wanted)
    test_rows_are_sorted_by_expert_and_token(cuda)
    test_tokens_are_routed(cuda, ROUTINGS[-1], 60)


def test_many_rows_in_several_turns(cpu: Any) -> None:
    """More than fits into the memory that turned rows take at a time, for some experts; few for others."""
    weights = layer(5, 2100, [70], F32)
    starts = torch.tensor([0, 0, 1500, 1503, 4600, 4640], dtype=torch.int32)
    rows = torch.cat([torch.arange(int(n)) for n in starts.diff()])
    x = randn(4640, 2100, dtype=F32)
    got = cpu.grouped_linear(x, starts, rows, weights)
    for e in range(5):
        part = x[starts[e] : starts[e + 1]]
        assert same_bits(got[starts[e] : starts[e + 1]], cpu.linear(part, weights.weights[e], weights.biases[e]))


SEGMENTS = [(0, 1, 0, 1.0), (1, 2, 1, 1.0), (2, 12, 2, 0.5), (2, 12, 0, -1.0), (14, 14, 0, 1.0), (15, 55, 1, 1.0),
            (60, 90, 3, 1.0)]  # fmt: skip
RANKS = {0: 5, 1: 40, 2: 1, 3: 0}


def tables_for(kernels: Any, weights: ExpertWeights, without: tuple[int, int]) -> list[list[LoraTable | None]]:
    """Adapters for every weight but one; those of odd slots scale and shift besides."""
    tables: list[list[LoraTable | None]] = []
    for e, own_weights in enumerate(weights.weights):
        tables.append([])
        for i, weight in enumerate(own_weights):
            columns, features = weight.shape
            table = LoraTable(features, columns, weights.dtype, row_major=kernels.ROW_MAJOR_B)
            for slot, rank in RANKS.items():
                seed = 100 * slot + 10 * e + i
                odd = slot % 2 == 1
                table.put(slot, lora_weights(kernels, rank, features, columns, weights.dtype, seed, odd, True))
            tables[-1].append(None if (e, i) == without else table)
    return tables


@pytest.mark.parametrize("features", [36, 136])
def test_a_rows_adapter_follows_it(kernels: Any, dtype: torch.dtype, features: int) -> None:
    """A row is as `linear` makes it of its own expert's weights and its token's adapters, alone."""
    weights = layer(6, features, [130, 45], dtype)
    tables = tables_for(kernels, weights, without=(2, 1))
    experts = choices(93, 2, 6)
    starts, rows, places = sorted_rows(kernels, experts, 6)
    x = randn(93, features, dtype=dtype)
    got = kernels.grouped_linear(x[rows], starts, rows, weights, tables, LoraSegments.of(SEGMENTS, 93))
    base = kernels.grouped_linear(x[rows], starts, rows, weights)
    for t in range(0, 93, 3 if is_gpu(kernels) else 1):
        mine = [(0, 1, slot, share) for first, end, slot, share in SEGMENTS if first <= t < end]
        for expert, place in zip(experts[t].tolist(), places[t].tolist(), strict=True):
            operands = weights.weights[expert], weights.biases[expert]
            alone = kernels.linear(x[t : t + 1], *operands, None, tables[expert], LoraSegments.of(mine, 1))
            assert same_bits(got[place : place + 1], alone), (t, expert)
            assert mine or same_bits(got[place], base[place])
    assert not same_bits(got, base)


def test_adapters_of_many_rows(kernels: Any) -> None:
    """More rows and segments than a GPU's threads look at one by one; padding, and slots that are empty."""
    weights = layer(3, 8, [5], BF16)
    tables = tables_for(kernels, weights, without=(9, 9))
    experts = choices(700, 2, 3)
    starts, rows, _ = sorted_rows(kernels, experts, 3)
    x = randn(1400, 8, dtype=BF16)
    assert any(start % 2 for start in starts[1:3])  # a thread looks at two rows, here of two experts
    named = [(i, i + 1, i % 5, 1.0) for i in range(300)]
    named += [(first, first + 40, slot, 0.5) for first in (300, 400, 500) for slot in (1, 0, 2)]
    segments = LoraSegments(350, 700, layers=4)
    for one in (named, [(0, 700, 1, 1.0)]):
        segments.fill(one)
        got = kernels.grouped_linear(x, starts, rows, weights, tables, segments)
        for e, (first, end) in enumerate(pairwise(starts.tolist())):
            mine = expert_segments(segments, rows[first:end])
            part, operands = x[first:end], (weights.weights[e], weights.biases[e])
            assert same_bits(got[first:end], kernels.linear(part, *operands, None, tables[e], mine))
    assert same_bits(kernels.grouped_linear(x, starts, rows, weights, [[None]] * 3, segments),
                     kernels.grouped_linear(x, starts, rows, weights))  # fmt: skip


def test_adapters_come_and_go(kernels: Any) -> None:
    """Tables that move, and one that first has an adapter of a larger rank."""
    weights = layer(2, 16, [24, 8], F32)
    tables: list[list[LoraTable | None]] = [[None, None], [None, None]]
    starts, rows = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 1, 0, 1, 2])
    x = randn(5, 16, dtype=F32)
    segments = LoraSegments.of([(0, 1, 0, 1.0), (1, 3, 6, 1.0)], 3)
    slots = 1 if is_gpu(kernels) else 7  # the CPU's refuse a segment of a slot that a table has not

    def check() -> torch.Tensor:
        got = kernels.grouped_linear(x, starts, rows, weights, tables, segments)
        for e, (first, end) in enumerate(pairwise(starts.tolist())):
            mine = expert_segments(segments, rows[first:end])
            operands = weights.weights[e], weights.biases[e]
            assert same_bits(got[first:end], kernels.linear(x[first:end], *operands, None, tables[e], mine))
        return got

    seen = [check()]
    assert same_bits(seen[0], kernels.grouped_linear(x, starts, rows, weights))
    for e, i, slot, rank in [(1, 0, 0, 2), (0, 1, 6, 3), (1, 0, 6, 9), (0, 1, 0, 1)]:
        table = tables[e][i] = tables[e][i] or LoraTable(16, weights.rows[i], F32, slots, row_major=kernels.ROW_MAJOR_B)
        table.put(slot, lora_weights(kernels, rank, 16, weights.rows[i], F32, slot, False, True))
        seen.append(check())
        assert not same_bits(seen[-1], seen[-2])
    table.drop(0)
    assert same_bits(check(), seen[-2])
    if kernels is not reference:  # which does not look at them
        with pytest.raises(ValueError, match="tables: expected"):
            kernels.grouped_linear(x, starts, rows, weights, [tables[0], [tables[0][1], None]], segments)


def test_what_points_nowhere_is_passed_over(cuda: Any) -> None:
    """A GPU cannot raise. The CPU's refusals are in test_arguments.py."""
    experts = torch.tensor([[0, 9], [-1, 2], [2, 3]], dtype=torch.int32)
    starts, rows, places = sorted_rows(cuda, experts, 3)
    assert starts.tolist() == [0, 1, 1, 3] and rows[:3].tolist() == [0, 1, 2]
    assert places.tolist() == [[0, -1], [-1, 1], [2, -1]]
    x, shares = randn(6, 24, dtype=F32), torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    places[0, 1] = 6
    wanted = cuda.combine(x, torch.tensor([[0], [1], [2]], dtype=torch.int32), shares[[0, 1, 2], [0, 1, 0]][:, None])
    assert same_bits(cuda.combine(x, places, shares), wanted)
    weights, tokens = layer(3, 24, [40], F32), torch.tensor([0, 1, 2, 3, 4, 5])
    right = cuda.grouped_linear(x, torch.tensor([0, 2, 2, 6], dtype=torch.int32), tokens, weights)
    got = cuda.grouped_linear(x, torch.tensor([-4, 2, 2, 70], dtype=torch.int32), tokens, weights)
    assert same_bits(got, right)
    tables = tables_for(cuda, weights, without=(9, 9))
    segments = LoraSegments.of([(0, 2, 9, 1.0), (2, 4, -1, 1.0), (4, 9, 0, 1.0)], 6)
    tokens[0], tokens[5] = -3, 60
    got = cuda.grouped_linear(x, torch.tensor([0, 2, 2, 6], dtype=torch.int32), tokens, weights, tables, segments)
    assert same_bits(got[[0, 1, 2, 3, 5]], right[[0, 1, 2, 3, 5]]) and not same_bits(got[4], right[4])


def test_a_token_does_not_depend_on_its_company(kernels: Any, dtype: torch.dtype) -> None:
    weights = layer(8, 64, [96], dtype)
    experts = choices(70, 3, 8)
    shares = torch.rand(70, 3, generator=torch.Generator().manual_seed(1))
    x = randn(70, 64, dtype=dtype)

    def run(span: slice) -> torch.Tensor:
        starts, rows, places = sorted_rows(kernels, experts[span].contiguous(), 8)
        y = kernels.grouped_linear(x[span][rows], starts, rows, weights)
        return kernels.combine(y, places, shares[span])

    together = run(slice(0, 70))
    for first, end in [(0, 1), (69, 70), (3, 40), (20, 33), (33, 34)]:
        assert same_bits(run(slice(first, end)), together[first:end])


def test_shares_are_added_up(kernels: Any, dtype: torch.dtype) -> None:
    sizes = [(0, 2, 8), (1, 1, 1), (5, 2, 33), (40, 8, 100), (6, 3, 80)]
    for (tokens, chosen, channels), lay in product(sizes, (strided_rows, wide_rows)):
        x = lay(randn(tokens * chosen + 3, channels, dtype=dtype))
        places = torch.randperm(tokens * chosen, generator=torch.Generator().manual_seed(2))
        places = places.view(tokens, chosen).int()
        weights, gate = randn(tokens, chosen, dtype=F32, seed=3), randn(tokens, 1, dtype=F32, seed=4)
        shared = lay(randn(tokens, channels, dtype=dtype, seed=5))
        terms = x.double()[places.long()] * weights.double().unsqueeze(-1)
        exact, size = terms.sum(1), terms.abs().sum(1)
        loss = (chosen + 4) * 2 * ROUNDING[F32]
        assert_close(kernels.combine(x, places, weights), exact, size * loss)
        assert_close(kernels.combine(x, places, weights, shared), exact + shared.double(), (size + shared.abs()) * loss)
        part = gate.double().sigmoid() * shared.double()
        assert_close(kernels.combine(x, places, weights, shared, gate), exact + part, (size + part.abs()) * loss)


def test_weights_that_do_not_fit_are_refused() -> None:
    good = torch.zeros(4, 8)
    for bad in (torch.zeros(4, 7), torch.zeros(3, 8), good.half(), good.t().contiguous().t(), good.to("meta")):
        with pytest.raises(ValueError, match=r"weights\[1\]\[0\]: expected \[4, 8\]"):
            ExpertWeights([[good], [bad]])
    with pytest.raises(ValueError, match=r"biases\[0\]\[0\]: expected \[4\]"):
        ExpertWeights([[good]], [[torch.zeros(5)]])
    for wrong in ({"scores": "softmin"}, {"groups": 2, "top_groups": 3}, {"group_best": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Routing(**wrong)  # type: ignore[arg-type]
