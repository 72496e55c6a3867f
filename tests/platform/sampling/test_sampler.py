"""The sampler: rows do not see each other, draws follow the distribution, filters keep what others keep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire import SamplingParams
from quire.platform.sampling import distribution, sampler
from quire.platform.sampling.results import Sampled
from quire.platform.sampling.sampler import top_logprobs, uniform
from tests.platform.sampling.specs import Spec, processed, sample

GREEDY = SamplingParams(temperature=0)


def spec(
    row: int = 0,
    params: SamplingParams = GREEDY,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    seed: int = 0,
    stop: Sequence[int] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Spec:
    return Spec(row, params, prompt, output, seed, stop, bad_words)


def peaked(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def draw_many(logits: Sequence[float], params: SamplingParams, count: int) -> np.ndarray:
    """How often each token was drawn, at `count` positions of one sequence."""
    table = torch.tensor([logits], dtype=torch.float32)
    specs = [spec(params=params, output=[0] * (n % 50), seed=n // 50) for n in range(count)]
    return np.bincount([drawn.token_id for drawn in sample(table, specs)], minlength=len(logits))


def assert_follows(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square, at most five standard deviations above its mean; nothing impossible is drawn."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95, logprobs=0),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=1.3, top_k=7, top_p=0.5, logprobs=20),
    SamplingParams(min_p=0.05),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, top_p=0.99),
    SamplingParams(logit_bias={5: 3.0}, bad_words=["x"], min_tokens=9, logprobs=1),
    SamplingParams(allowed_token_ids=range(100, 900), temperature=2.0),
    SamplingParams(temperature=1.5, top_p=0.9),
]


@pytest.mark.parametrize("vocab", [50_000, 50_257, 151_000])
def test_a_row_is_the_same_bitwise_alone_and_in_a_crowd(vocab: int) -> None:
    logits = peaked(33, vocab)
    specs = [
        spec(row, MIXED[row % len(MIXED)], [1, 2, 3], [7, 9, 9], row * 31, [4], ((9, 5), (6,))) for row in range(33)
    ]
    together = sample(logits, specs)
    assert len({drawn.token_id for drawn in together}) > 5
    for one, drawn in zip(specs, together, strict=True):
        alone = sample(logits[one.row : one.row + 1].clone(), [dataclasses.replace(one, row=0)])
        assert alone == [drawn]  # floats compare exactly
    shuffled = [specs[i] for i in torch.randperm(33, generator=torch.Generator().manual_seed(1)).tolist()]
    assert sample(logits, shuffled) == [together[one.row] for one in shuffled]


def test_prompt_logprobs_are_the_same_bitwise_alone_and_in_a_crowd() -> None:
    logits = peaked(9, 50_257)
    together = top_logprobs(logits, range(9), 5)
    assert together == [top_logprobs(logits[i : i + 1].clone(), [i], 5)[0] for i in range(9)]


def test_the_logits_are_left_as_they_are() -> None:
    logits = peaked(len(MIXED), 1000)
    before = logits.clone()
    sample(logits, [spec(i, p, [1], [2], i, [3], ((4,),)) for i, p in enumerate(MIXED)])
    assert torch.equal(logits, before)


def test_draws_depend_on_seed_and_position_only() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams()
    by_position = [sample(logits, [spec(params=params, output=[1] * n, seed=5)])[0].token_id for n in range(40)]
    again = [sample(logits, [spec(params=params, output=[2] * n, seed=5)])[0].token_id for n in range(40)]
    other = [sample(logits, [spec(params=params, output=[1] * n, seed=6)])[0].token_id for n in range(40)]
    assert by_position == again and len(set(by_position)) > 30
    assert sum(a == b for a, b in zip(by_position, other, strict=True)) < 3
    assert uniform(5, 0) == uniform(5, 0) != uniform(5, 1)
    assert all(0 <= uniform(seed, 0) < 1 for seed in (0, -1, -(2**63), 2**64 - 1))


def test_uniform_is_pinned() -> None:
    """A changed hash would change every seeded answer between versions."""
    assert [uniform(0, 0), uniform(1, 2)] == [0.0564663990004608, 0.6434025071674214]


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.6}, None),
        ({"top_k": 4, "top_p": 0.7, "temperature": 2.0}, None),
        ({"min_p": 0.3}, None),
        ({"min_p": 0.1, "top_p": 0.8, "top_k": 5}, None),
    ],
)
def test_draws_follow_the_distribution(kwargs: dict[str, float], kept: int | None) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.9, -0.5, 1.0])
    params = SamplingParams(**kwargs)  # type: ignore[arg-type]
    probabilities = exact_probabilities(logits, params)
    assert kept is None or (probabilities > 0).sum() == kept
    assert_follows(draw_many(logits.tolist(), params, 6000), probabilities)


def exact_probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """By Hugging Face's warpers, in the sampler's order."""
    scores = logits[None].double() / params.temperature
    warpers: list[LogitsProcessor] = []
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    for warper in warpers:
        scores = warper(torch.empty(1, 0, dtype=torch.long), scores)
    return scores.softmax(-1)[0].numpy()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([20, 300, 3000]),
    scale=st.floats(0.1, 8),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 400),
    min_p=st.floats(0, 0.5),
)
def test_the_kept_set_is_transformers(
    seed: int, vocab: int, scale: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale
    params = SamplingParams(top_p=top_p, top_k=min(top_k, vocab - 1), min_p=min_p)
    probabilities = exact_probabilities(logits, params)
    weights = distribution.weigh(logits.numpy(), int(logits.argmax()), params)
    if weights.order is None:
        assert weights.weights is not None
        kept = set(np.flatnonzero(weights.weights).tolist())
    else:
        mass = np.diff(weights.cumulative, prepend=0.0)  # type: ignore[arg-type]
        kept = set(weights.order[mass > 0].tolist())
    # Rounding may move the last token across the border; no other.
    assert len(kept ^ set(np.flatnonzero(probabilities).tolist())) <= 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.999), st.sampled_from([0.0, 0.5, 3.0]), st.booleans())
def test_widening_does_not_show(seed: int, top_p: float, scale: float, coarse: bool) -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed)) * scale
    if coarse:  # many equal values, as bfloat16 logits have
        logits = logits.bfloat16()
    params = SamplingParams(top_p=top_p)
    results = []
    for first_look, widen in ((1, 2), (256, 8), (10**6, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distribution, "_FIRST_LOOK", first_look)
            patch.setattr(distribution, "_WIDEN", widen)
            results.append(sample(logits, [spec(params=params, seed=n) for n in range(5)]))
    assert results[0] == results[1] == results[2]


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, -0.0, 2.0]])
    assert sample(logits, [spec()])[0].token_id == 1
    two = {sample(logits, [spec(params=SamplingParams(top_k=2), seed=n)])[0].token_id for n in range(60)}
    assert two == {1, 2}
    nucleus = {sample(logits, [spec(params=SamplingParams(top_p=0.5), seed=n)])[0].token_id for n in range(60)}
    assert nucleus == {1, 2}
    (top,) = top_logprobs(logits, [3], 7)
    assert top.ids == (1, 2, 3, 6, 0, 4, 5) and top.rank == 3


def test_top_k_of_one_and_tiny_top_p_are_greedy() -> None:
    logits = peaked(4, 5000)
    best = logits.argmax(-1).tolist()
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0), GREEDY):
        assert [s.token_id for s in sample(logits, [spec(i, params, seed=i) for i in range(4)])] == best


def test_filters_that_filter_nothing_keep_everything() -> None:
    counts = draw_many([0.0] * 10, SamplingParams(top_k=2**31, top_p=1.0), 1000)
    assert (counts > 0).all()


def test_a_block_without_weight_is_never_drawn() -> None:
    logits = torch.full((1, 2000), -math.inf)
    logits[0, [300, 1999]] = 0.0
    drawn = [s.token_id for s in sample(logits, [spec(params=SamplingParams(), seed=n) for n in range(100)])]
    assert set(drawn) == {300, 1999}


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3)])
def test_the_ends_of_the_unit_interval(number: float, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: number)
    for vocab in (3, 255, 256, 257, 1001):
        logits = peaked(1, vocab, seed=vocab)
        logits[0, [0, -1]] = -math.inf
        token = sample(logits, [spec(params=params)])[0].token_id
        assert 0 < token < vocab - 1


# ---------------------------------------------------------------------- constraints, penalties


def constrained(logits: torch.Tensor, one: Spec) -> np.ndarray:
    return processed(logits.numpy(), one.state(len(logits)))


def test_repetition_penalty_is_transformers() -> None:
    logits = peaked(1, 500)
    prompt, output = [1, 2, 3, 3, 499], [7, 2, 8]
    ours = constrained(logits[0], spec(params=SamplingParams(repetition_penalty=1.3), prompt=prompt, output=output))
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits.clone())
    np.testing.assert_array_equal(ours, theirs[0].numpy())


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(10)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    ours = constrained(logits, spec(params=params, prompt=[1, 1, 1], output=[2, 3, 3, 3]))
    expected = np.zeros(10, np.float32)
    expected[2], expected[3] = -0.75, -1.25
    np.testing.assert_array_equal(ours, expected)


def test_ids_may_be_arrays_and_lie_outside_the_vocabulary() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    one = spec(params=params, prompt=np.array([1, 70_000]), output=[2, 999])  # type: ignore[arg-type]
    np.testing.assert_array_equal(constrained(torch.ones(5), one), np.array([1, 0.5, -0.5, 1, 1], np.float32))


def test_logit_bias_and_allowed_tokens() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0, 1.0]])
    assert sample(logits, [spec(params=SamplingParams(temperature=0, logit_bias={2: 6}))])[0].token_id == 2
    assert sample(logits, [spec(params=SamplingParams(temperature=0, allowed_token_ids=[1, 3]))])[0].token_id == 3
    counts = draw_many(logits[0].tolist(), SamplingParams(allowed_token_ids=[1, 2]), 400)
    assert counts[1] + counts[2] == 400 and min(counts[1], counts[2]) > 100
    # A bias lifts no token that is not allowed.
    params = SamplingParams(temperature=0, allowed_token_ids=[1], logit_bias={0: 100})
    assert sample(logits, [spec(params=params)])[0].token_id == 1


def test_min_tokens_forbids_the_end_until_then() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    params = SamplingParams(temperature=0, min_tokens=2)
    chosen = [sample(logits, [spec(params=params, output=[0] * n, stop=[1, 2])])[0].token_id for n in range(4)]
    assert chosen == [3, 3, 1, 1]


def test_bad_words_forbid_the_last_token_after_its_prefix() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 3.0]])
    words = ((2,), (1, 3))
    for output, token in (([], 3), ([1], 1), ([1, 0], 3), ([0, 1], 1), ([3], 3)):
        assert sample(logits, [spec(output=output, bad_words=words)])[0].token_id == token
    assert sample(logits, [spec(output=[1], prompt=[0], bad_words=((0, 1, 2),))])[0].token_id == 2


def test_constraints_that_leave_nothing_fail_that_row_only() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    impossible = SamplingParams(allowed_token_ids=[1], min_tokens=1, logprobs=1)
    failed, fine = sample(logits, [spec(0, impossible, stop=[1]), spec(1)])
    assert failed.token_id == -1 and failed.logprobs is None and "allowed_token_ids" in str(failed.error)
    assert fine == Sampled(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", MIXED[:8])
def test_logits_that_are_not_finite_fail_that_row_only(bad: float, params: SamplingParams) -> None:
    logits = peaked(3, 700)
    alone = sample(logits, [spec(2, params, seed=1)])
    logits[1, 600] = bad
    failed, fine = sample(logits, [spec(1, params), spec(2, params, seed=1)])
    assert failed.token_id == -1 and "not finite" in str(failed.error)
    assert [fine] == alone
    logits[1] = -math.inf
    assert sample(logits, [spec(1, params)])[0].error is not None
    assert math.isnan(top_logprobs(logits[1:2], [0], 3)[0].chosen)


# ---------------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models_own() -> None:
    logits = peaked(3, 2000).bfloat16()
    reference = logits.double().log_softmax(-1)
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={3: 50}, repetition_penalty=1.5, logprobs=4)
    for row, drawn in enumerate(sample(logits, [spec(i, params, prompt=[1], seed=i) for i in range(3)])):
        assert drawn.token_id == 3 and drawn.logprobs is not None
        assert drawn.logprobs.chosen == pytest.approx(float(reference[row, 3]), abs=1e-5)
        values, _ = reference[row].topk(4)
        assert drawn.logprobs.values == pytest.approx(values.tolist(), abs=1e-5)
        higher = int((logits[row] > logits[row, 3]).sum())
        assert drawn.logprobs.rank == 1 + higher + int((logits[row, :3] == logits[row, 3]).sum())
        assert [token for token, _, _ in drawn.logprobs.ranked()] == [3, *drawn.logprobs.ids]


@pytest.mark.parametrize("count", [0, 1, 7, 300, -1])
def test_top_logprobs_of_any_count(count: int) -> None:
    logits = peaked(2, 999)
    logits[0, 10] = -math.inf
    wanted = 999 if count == -1 else count
    for row, top in enumerate(top_logprobs(logits, [5, 10], count)):
        order = logits[row].argsort(descending=True, stable=True).tolist()
        possible = [token for token in order if logits[row, token] > -math.inf]
        assert list(top.ids) == possible[:wanted]
        assert list(top.values) == sorted(top.values, reverse=True)
        assert dict(top.items()) == {t: v for t, v, _ in top.ranked() if t in top.ids}
        ranks = {token: rank for token, _, rank in top.ranked()}
        assert all(order[rank - 1] == token for token, rank in ranks.items())


def test_a_row_drawn_n_times_is_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = peaked(1, 1000)
    first = spec(params=SamplingParams(n=8, top_p=0.9))
    specs = [dataclasses.replace(first, seed=seed) for seed in range(8)]
    singly = [sample(logits, [one])[0] for one in specs]
    calls: list[int] = []
    weigh = sampler.weigh
    monkeypatch.setattr(sampler, "weigh", lambda *given: calls.append(1) or weigh(*given))
    assert sample(logits, specs) == singly and len(calls) == 1
