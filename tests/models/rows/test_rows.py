"""Every family's rows: transformers' tokens and logprobs, PEFT's adapters, promise 1, and steps that are recorded.

A family's data file says which configurations. `make test` runs one of them; the others and what takes longer are slow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from quire import kernels
from tests.lora.peft_world import World, text_world
from tests.models.rows import all_rows
from tests.models.rows.checks import bfloat16_errors, recorded_shapes
from tests.models.tiny import build, make, save
from tests.platform.engine.parity import check_forks, check_greedy

ROWS = all_rows()
CASES = [
    pytest.param(architecture, variant, marks=[] if variant == row.first else [pytest.mark.slow])
    for architecture, row in ROWS.items()
    for variant in row.variants
]
ADAPTERS = [(architecture, name) for architecture, row in ROWS.items() for name in row.adapters()]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("architecture", ROWS)
def test_a_family_has_variants(architecture: str) -> None:
    row = ROWS[architecture]
    assert len(row.variants) >= 6 and set(row.quick) | row.by_length <= set(row.variants) and 1 <= len(row.quick) <= 3


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_tokens_and_prompt_logprobs(architecture: str, variant: str, tmp_path: Path) -> None:
    oracle = make(architecture, variant)
    path = save(oracle, tmp_path)
    check_greedy(oracle.double(), path, by_length=variant in ROWS[architecture].by_length)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "variant"), [(one, row.first) for one, row in ROWS.items()])
def test_bfloat16_is_as_close_to_float64_as_transformers_is(architecture: str, variant: str, tmp_path: Path) -> None:
    ours, theirs = bfloat16_errors(architecture, variant, tmp_path)
    assert 0 < ours <= theirs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "variant"), [(one, name) for one, row in ROWS.items() for name in row.quick])
def test_company_changes_no_bit(architecture: str, variant: str, dtype: str, tmp_path: Path) -> None:
    """Requests alone, whose steps are recorded, and in a crowd."""
    crowd = check_forks(build(architecture, variant, tmp_path), dtype)
    if kernels.backend().__name__ == "quire.kernels.native" and variant not in ROWS[architecture].by_length:
        assert bool(recorded_shapes(crowd)) == ROWS[architecture].recorded


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    made: dict[str, Any] = {}

    def get(architecture: str) -> World:
        if architecture not in made:
            made.clear()  # the tests come by family
            row = ROWS[architecture]
            made[architecture] = text_world(
                tmp_path_factory.mktemp(architecture), architecture, row.first, **row.adapted
            )
        return made[architecture]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), ADAPTERS)
def test_adapters_are_pefts(world_of: Callable[[str], World], architecture: str, name: str) -> None:
    world = world_of(architecture)
    assert world.agree(world.train(LoraConfig(**ROWS[architecture].adapters()[name]), seed=7))
