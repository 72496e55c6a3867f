"""Every family's rows: transformers' tokens and logprobs, PEFT's adapters, promise 1, and steps that are recorded.

A family's data file says which configurations. `make test` runs two of them; the others and what takes longer are slow.
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
from tests.models.rows.checks import bfloat16_error, recorded_shapes
from tests.models.rows.row import VOCAB
from tests.models.tiny import build, make, save
from tests.platform.engine.parity import check_forks, check_greedy, prompts

ROWS = all_rows()
CASES = [
    pytest.param(architecture, variant, marks=[] if variant in row.compared[:2] else [pytest.mark.slow])
    for architecture, row in ROWS.items()
    for variant in row.variants
]
PAIRS = [(architecture, variant) for architecture, row in ROWS.items() for variant in row.compared]
# Of CodeGen transformers keeps the turned queries and keys in float32; the pool has them in bfloat16.
WIDER = {("CodeGenForCausalLM", "published")}
# Attention on AMX rounds its weights to bfloat16, as transformers does: where routing then outweighs all else, even the
# median of a few draws may be a little more than 1.
BY_CHANCE = {("Dots1ForCausalLM", "groups"): 1.1}
ADAPTERS = [(architecture, name) for architecture, row in ROWS.items() for name in row.adapters()]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("architecture", ROWS)
def test_a_family_has_variants(architecture: str) -> None:
    row = ROWS[architecture]
    named = {*row.quick, *row.by_length, *row.token_by_token, *row.upcasts}
    assert len(row.variants) >= 6 and named <= set(row.variants) and 1 <= len(row.quick) <= 3
    for bound in ("sliding_window", "attention_chunk_size"):
        sizes = [{**row.base, **settings}.get(bound) for settings in row.variants.values()]
        assert min(filter(None, sizes), default=0) < max(map(len, prompts(VOCAB)))


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_tokens_and_prompt_logprobs(architecture: str, variant: str, tmp_path: Path) -> None:
    """In float64: what transformers computes, without its own rounding. The engine runs in float32."""
    row, oracle = ROWS[architecture], make(architecture, variant)
    path = save(oracle, tmp_path)
    check_greedy(
        oracle if variant in row.upcasts else oracle.double(),
        path,
        by_length=variant in row.by_length,
        token_by_token=variant in row.token_by_token,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "variant"), [pair for pair in PAIRS if pair not in WIDER])
def test_bfloat16_is_as_close_to_float64_as_transformers_is(architecture: str, variant: str, tmp_path: Path) -> None:
    most = BY_CHANCE.get((architecture, variant), 1.0)
    assert 0 < bfloat16_error(architecture, variant, tmp_path) <= most


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "variant"), PAIRS)
def test_company_changes_no_bit(architecture: str, variant: str, dtype: str, tmp_path: Path) -> None:
    """Requests alone, whose steps are recorded, and in a crowd."""
    row, crowd = ROWS[architecture], check_forks(build(architecture, variant, tmp_path), dtype)
    if kernels.backend().__name__ == "quire.kernels.native" and variant not in row.by_length:
        assert bool(recorded_shapes(crowd)) == (row.recorded and variant not in row.unrecorded)


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
