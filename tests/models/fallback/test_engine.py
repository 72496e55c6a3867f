"""The engine on transformers' own modules: its greedy tokens and logprobs, company, and PEFT's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig

from quire import kernels
from tests.lora.peft_world import text_world
from tests.models import tiny
from tests.models.fallback.families import check_recorded
from tests.models.rows import all_rows
from tests.platform.engine.parity import check_greedy

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {
    "LlamaForCausalLM": "gqa",
    "Gemma3ForCausalLM": "as_published",
    "Qwen3MoeForCausalLM": "as_published",
    "GptOssForCausalLM": "as_published",
    "DeepseekV3ForCausalLM": "v3",
    "GPT2LMHeadModel": "gelu_new",
}
ADAPTED = [
    ("LlamaForCausalLM", "all_linear"),
    ("Qwen3ForCausalLM", "all_linear"),
    ("Qwen3ForCausalLM", "embedding_and_saved"),
    ("GPT2LMHeadModel", "dora_patterns"),
    ("PhiForCausalLM", "embedding_and_saved"),
    ("Qwen3MoeForCausalLM", "dora_patterns"),
    ("GemmaForCausalLM", "embedding_and_saved"),
    ("CohereForCausalLM", "all_linear"),
]


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] if name[0] != "L" else []) for name in GREEDY]
)
def test_greedy_tokens_and_prompt_logprobs(architecture: str, tmp_path: Path) -> None:
    """In a crowd, in chunks, some preempted: transformers' in float64."""
    oracle = tiny.make(architecture, GREEDY[architecture])
    path = tiny.save(oracle, tmp_path)
    check_greedy(oracle.double(), path, model_impl="transformers")


RECORDED = {
    "LlamaForCausalLM": "gqa",
    "Gemma3ForCausalLM": "as_published",
    "Qwen3MoeForCausalLM": "as_published",
    "GPT2LMHeadModel": "gelu_new",
    "DeepseekV3ForCausalLM": "v3",
}


@pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="the twins are never recorded")
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] if name[0] != "L" else []) for name in RECORDED]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Steps of one token a sequence are replayed, and have the bits of those that run through Python."""
    path = tiny.build(architecture, RECORDED[architecture], tmp_path)
    check_recorded(path, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), ADAPTED)
def test_adapters_are_pefts(architecture: str, name: str, tmp_path: Path) -> None:
    row = all_rows()[architecture]
    world = text_world(tmp_path, architecture, row.first, model_impl="transformers", **row.adapted)
    assert world.agree(world.train(LoraConfig(**row.adapters()[name]), seed=7))
