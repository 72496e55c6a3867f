"""Vectors of the bundled model, which was never trained for them: stories of one hero lie closer than of two."""

from __future__ import annotations

from itertools import permutations
from statistics import median

import pytest
import torch

from quire import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "gray")
SHAPES = ("circle", "square", "triangle", "star")
HEROES = [(color, shape) for color in COLORS for shape in SHAPES]
SHORT = ("There was a {0}. The {0} ran to the garden.", "One day, a {0} woke up. The {0} found a coin.")
LONG = (
    "There was a {0}. The {0} ran to the garden. The {0} was happy.",
    "One day, a {0} woke up. The {0} found a coin. It was a {0}.",
    "In the morning, the {0} rolled to the castle. The {0} was tired. The {0} went home.",
)


@pytest.fixture(scope="module")
def mean() -> LLM:
    return LLM(runner="pooling", convert="embed", pooler_config={"pooling_type": "MEAN"}, num_gpu_blocks_override=1024)


def margins(llm: LLM, stories: tuple[str, ...]) -> list[float]:
    """By how much a story's cosine to another of the same hero is larger than to another of one that has neither its
    color nor its shape; of all such heroes and pairs of stories."""
    texts = [story.format(f"{color} {shape}") for story in stories for color, shape in HEROES]
    rows = torch.tensor([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)], dtype=torch.float64)
    rows = rows.view(len(stories), len(HEROES), -1)
    found = []
    for one, other in permutations(range(len(stories)), 2):
        cosines = rows[one] @ rows[other].T
        for place, (color, shape) in enumerate(HEROES):
            strangers = [n for n, (c, s) in enumerate(HEROES) if c != color and s != shape]
            found += [float(cosines[place, place] - cosines[place, stranger]) for stranger in strangers]
    return found


def test_two_stories_of_one_hero_lie_closer_than_of_two(mean: LLM) -> None:
    found = margins(mean, SHORT)
    assert len(found) == 1344
    assert min(found) > 0.001  # all of them; 0.0034 where this was measured
    assert median(found) > 0.03


def test_of_longer_stories_nearly_all_do(mean: LLM) -> None:
    found = margins(mean, LONG)
    assert len(found) == 4032
    assert sum(one > 0 for one in found) / len(found) > 0.96  # 0.974 where this was measured
    assert median(found) > 0.03


def test_the_red_circle(mean: LLM) -> None:
    asked = SHORT[0].format("red circle")
    same, other = mean.score(asked, [SHORT[1].format("red circle"), SHORT[1].format("blue square")], use_tqdm=False)
    assert same.outputs.score > other.outputs.score + 0.02
