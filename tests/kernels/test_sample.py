"""Draws on the GPU against the sampler of the host, and against the inverse of the distribution in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.kernels import sampling
from quire.platform.sampling import sampler
from quire.platform.sampling.distribution import weigh
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.sampling_input import SamplingInput, SamplingState

NEAR = 1e-6  # how far a bound of the distribution may lie from float64's
UNSURE = 1e-5  # a mass so close to top_p's limit, or a weight so close to min_p, may go either way

pytestmark = pytest.mark.usefixtures("cuda")


def draws(uniforms: Iterable[float] = (0.5,), row: int = 0, **settings: float) -> NDArray[np.void]:
    numbers = np.asarray(list(uniforms), np.float64)
    made = np.zeros(len(numbers), sampling.DRAW)
    made["row"], made["uniform"], made["temperature"], made["top_p"] = row, numbers, 1, 1
    for name, value in settings.items():
        made[name] = value
    return made


def drawn(logits: torch.Tensor, made: NDArray[np.void]) -> NDArray[np.int64]:
    tokens = sampling.draw_tokens(logits, made)
    assert tokens.dtype is torch.int64 and tokens.shape == (len(made),)
    return tokens.numpy()


def token_draw(row: int, **settings: Any) -> sampler.TokenDraw:
    return sampler.TokenDraw(row, SamplingState(SamplingInput(SamplingParams(**settings))), 0)


class Distribution:
    """What a row's settings leave, in float64: the kept ids, ascending, and the distribution's bounds after each."""

    def __init__(self, row: NDArray[np.float32], temperature: float, top_p: float, min_p: float, top_k: int) -> None:
        values = row.astype(np.float64)
        weights = np.exp((values - values.max()) / float(np.float32(temperature)))
        # Whether rounding may change what is kept.
        self.unsure = bool((abs(weights - min_p) < min_p * UNSURE).any()) and 0 < min_p < 1
        weights[weights < np.float32(min_p)] = 0
        order = np.lexsort((np.arange(len(row)), -values))
        if 0 < top_k < len(row):
            order = order[:top_k]
        if top_p < 1:
            reached = np.cumsum(weights[order]) / weights[order].sum()
            place = int(np.searchsorted(reached, np.float32(top_p)))
            near = np.flatnonzero(abs(reached - np.float32(top_p)) < UNSURE)
            # Within a run of equal logits or of nothing, the limit may still be met sooner or later.
            self.unsure |= bool((weights[order[near]] > 0).any())
            order = order[: place + 1]
        kept = np.sort(order)
        self.ids = kept[weights[kept] > 0]
        bounds = np.cumsum(weights[self.ids])
        self.bounds = bounds / bounds[-1]

    def uniforms(self, some: int) -> NDArray[np.float64]:
        """Numbers that tell where the bounds of `some` tokens lie, besides evenly spaced ones."""
        chosen = np.unique(np.linspace(0, len(self.ids) - 1, some).astype(int))
        above = self.bounds[chosen] + 2 * NEAR
        below = self.bounds[chosen] - 2 * NEAR
        numbers = np.concatenate([above, below, (np.arange(some) + 0.5) / some, [0, 1 - 2.0**-53]])
        return np.clip(numbers, 0, 1 - 2.0**-53)

    def check(self, uniforms: NDArray[np.float64], tokens: NDArray[np.int64]) -> None:
        assert np.isin(tokens, self.ids).all(), f"{tokens[~np.isin(tokens, self.ids)]} were not kept"
        places = np.searchsorted(self.ids, tokens)
        lower = np.concatenate([[0], self.bounds[:-1]])[places]
        assert (uniforms >= lower - NEAR).all() and (uniforms < self.bounds[places] + NEAR).all()


def rows(vocabulary: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Logits of several kinds."""
    rng = np.random.default_rng(seed)
    normal = (3 * rng.standard_normal(vocabulary)).astype(np.float32)
    ruled_out = normal.copy()
    ruled_out[rng.permutation(vocabulary)[: vocabulary // 2]] = -np.inf
    alone = np.full(vocabulary, -np.inf, np.float32)
    alone[vocabulary // 3] = -7
    zeros = np.zeros(vocabulary, np.float32)
    zeros[::2] = -0.0
    return {
        "normal": normal,
        "steps": np.round(normal),  # many equal logits
        "flat": np.full(vocabulary, -3.25, np.float32),
        "zeros": zeros,
        "ruled out": ruled_out,
        "alone": alone,
        "peaked": np.where(np.arange(vocabulary) == vocabulary - 1, 60, normal).astype(np.float32),
        "large": (1e36 * normal).astype(np.float32),
    }


# top_k None: the whole vocabulary; -1: none.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 2, "temperature": 1.5},
    {"top_k": 40},
    {"top_k": None},
    {"top_k": 10**6},
    {"top_k": -1, "top_p": 0.9},
    {"top_p": 0.5, "temperature": 2},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"top_p": 0.8, "top_k": 7},
    {"top_p": 0.4, "top_k": 200, "min_p": 0.02, "temperature": 1.3},
]


def complete(settings: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    made = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, **settings}
    return {**made, "top_k": vocabulary if made["top_k"] is None else made["top_k"]}


def check_rows(table: Sequence[NDArray[np.float32]], settings: Sequence[dict[str, Any]], some: int) -> None:
    """Every setting on every row, all in one call."""
    parts, distributions = [], []
    for place, row in enumerate(table):
        for one in settings:
            full = complete(one, len(row))
            distribution = Distribution(row, **full)
            if not distribution.unsure:
                parts.append(draws(distribution.uniforms(some), place, **full))
                distributions.append(distribution)
    assert len(parts) > 0.7 * len(table) * len(settings)
    made = np.concatenate(parts)
    tokens = np.split(drawn(torch.from_numpy(np.stack(table)), made), np.cumsum([len(part) for part in parts])[:-1])
    for distribution, part, found in zip(distributions, parts, tokens, strict=True):
        distribution.check(part["uniform"], found)


@pytest.mark.parametrize("kind", rows(4))
@pytest.mark.parametrize("vocabulary", [33, 1030])
def test_the_distribution(kind: str, vocabulary: int) -> None:
    check_rows([rows(vocabulary)[kind]], SETTINGS if vocabulary > 100 else SETTINGS[1::2], 2)


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 32, 63, 1023, 1024, 1025, 32_000])
def test_every_size(vocabulary: int) -> None:
    check_rows(list(rows(vocabulary, 1).values())[:2], [{}, {"top_k": 9, "top_p": 0.9}], 3)


@pytest.mark.parametrize("kind", ["normal", "steps", "flat"])
def test_the_largest_vocabulary(kind: str) -> None:
    settings = [{}, {"top_p": 0.95, "temperature": 0.8}, {"top_k": 1000}, {"top_k": 500, "top_p": 0.701}]
    # One token of a flat row is less than what float64 may be unsure of.
    check_rows([rows(262_144)[kind]], [settings[i] for i in ((0, 2, 3) if kind == "flat" else range(4))], 2)


def test_any_order_of_warps(order: int) -> None:
    check_rows(list(rows(2500).values())[:3], [{}, {"top_k": 40, "top_p": 0.9}], 2)


@pytest.mark.parametrize("vocabulary", [7, 300])
def test_greedy_is_the_hosts(vocabulary: int) -> None:
    table = torch.from_numpy(np.stack(list(rows(vocabulary).values())))
    expected = [
        one.token_id for one in sampler.sample(table, [token_draw(i, temperature=0) for i in range(len(table))])
    ]
    made = np.concatenate([draws([0.9], row, temperature=0) for row in range(len(table))])
    assert drawn(table, made).tolist() == expected
    made["temperature"], made["top_k"] = 1, 1
    assert drawn(table, made).tolist() == expected


@pytest.mark.parametrize("kind", ["normal", "steps", "ruled out"])
def test_what_is_kept_is_what_the_host_keeps(kind: str) -> None:
    row = rows(300)[kind]
    for settings in ({"top_k": 12}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.8, "temperature": 2.0, "min_p": 0.1}):
        weights = weigh(row, int(row.argmax()), SamplingParams(**settings))
        assert weights.order is not None and weights.cumulative is not None
        kept = weights.order[np.diff(weights.cumulative, prepend=0) > 0]
        distribution = Distribution(row, **complete(settings, 300))
        assert not distribution.unsure and np.array_equal(distribution.ids, np.sort(kept))
        middles = distribution.bounds - np.diff(distribution.bounds, prepend=0) / 2
        assert np.array_equal(drawn(torch.from_numpy(row[None]), draws(middles, **settings)), distribution.ids)


def test_equal_logits_are_ranked_by_id() -> None:
    row = np.full(500, -1, np.float32)
    row[[3, 40, 41, 77, 300, 499]] = 2
    row[[250, 450]] = 3
    uniforms = (np.arange(24) + 0.5) / 24
    table = torch.from_numpy(row[None])
    for top_k, kept in ((1, {250}), (2, {250, 450}), (4, {3, 40, 250, 450}), (7, {3, 40, 41, 77, 300, 250, 450})):
        assert set(drawn(table, draws(uniforms, top_k=top_k)).tolist()) == kept
    # 2 e + 6 of the eight: e, e, then ones; half of that is 5.72.
    assert set(drawn(table, draws(uniforms, top_k=8, top_p=0.5)).tolist()) == {250, 450, 3}
    assert set(drawn(table, draws(uniforms, top_k=8, top_p=0.45)).tolist()) == {250, 450}


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_no_token(bad: float) -> None:
    table = np.stack([rows(100)["normal"]] * 4)
    table[1, 70] = bad
    table[2] = -np.inf
    table[3] = bad
    for settings in ({}, {"temperature": 0}, {"top_k": 3, "top_p": 0.5}):
        made = np.concatenate([draws([0.3], row, **settings) for row in (3, 1, 0, 2, -1)])
        tokens = drawn(torch.from_numpy(table), made).tolist()
        assert tokens == [-1, -1, *drawn(torch.from_numpy(table[:1]), draws([0.3], **settings)).tolist(), -1, -1]


def test_strides_and_alignments_change_nothing() -> None:
    plain = torch.from_numpy(np.stack([rows(1001, seed)["steps"] for seed in range(3)]))
    made = np.concatenate(
        [draws([0.1, 0.77], row, **settings) for row in range(3) for settings in ({}, {"top_k": 99, "top_p": 0.9})]
    )
    expected = drawn(plain, made)
    for more, offset in ((23, 0), (24, 8), (7, 3)):
        wide = torch.full((3, 1001 + more), torch.nan)
        wide[:, offset : offset + 1001] = plain
        assert np.array_equal(drawn(wide[:, offset : offset + 1001], made), expected)


def test_a_draw_does_not_depend_on_its_company() -> None:
    table = torch.from_numpy(np.stack([rows(700, seed)["normal"] for seed in range(4)]))
    rng = np.random.default_rng(0)
    made = draws(rng.random(24), 0, top_p=0.95)
    made["row"] = rng.integers(0, 4, 24)
    made["top_k"] = rng.choice([0, 1, 50], 24)
    made["temperature"] = rng.choice([0, 0.7, 1.5], 24)
    together = drawn(table, made)
    alone = [int(drawn(table[one["row"] :][:1], draws([one["uniform"]], 0, **{
        name: one[name] for name in ("temperature", "top_p", "top_k")})).item()) for one in made]  # fmt: skip
    assert together.tolist() == alone
    turn = rng.permutation(24)
    assert np.array_equal(drawn(table, made[turn]), together[turn])


def test_no_draws() -> None:
    assert drawn(torch.zeros(2, 5), draws([])).tolist() == []


def test_what_is_wrong_is_said(cuda: ModuleType) -> None:
    logits, made = torch.zeros(2, 50), draws([0.5, 0.5])
    with pytest.raises(TypeError, match=r"^draws: "):
        sampling.draw_tokens(logits, np.zeros(2))
    with pytest.raises(TypeError, match=r"^draws: "):
        sampling.draw_tokens(logits, made[None])
    with pytest.raises(IndexError, match=r"^draws: a row is outside the 2 of logits"):
        sampling.draw_tokens(logits, draws(row=2))
    for wrong in (logits.double(), logits.to("meta"), logits[0], logits[None], logits[:, ::2], torch.zeros(2, 0)):
        with pytest.raises((TypeError, ValueError), match=r"^logits: "):
            cuda.sample(wrong, torch.zeros(32, dtype=torch.uint8))
    for size, dtype in ((33, torch.uint8), (32, torch.int8)):
        with pytest.raises((TypeError, ValueError), match=r"^draws: "):
            cuda.sample(logits, torch.zeros(size, dtype=dtype))
