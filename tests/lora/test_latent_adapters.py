"""Adapters of multi-head latent attention, whose projection of latents is absorbed: as PEFT computes them."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from quire import LoRARequest
from quire.errors import AdapterError
from tests.lora.peft_world import Expected, World, ask, text_world

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> World:
    return text_world(tmp_path_factory.mktemp("youtu"), "YoutuForCausalLM", "biases", num_hidden_layers=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["kv_b_proj"]},
        {"target_modules": ["kv_b_proj"], "use_dora": True},
        {"target_modules": ["kv_b_proj", "q_b_proj"], "use_dora": True, "use_rslora": True},
        {"target_modules": ["kv_b_proj", "o_proj"], "lora_bias": True},
        {"target_modules": ["kv_b_proj", "q_a_proj"], "bias": "all"},
        {"target_modules": ["kv_b_proj"], "modules_to_save": ["kv_a_layernorm", "q_b_proj"]},
    ],
    ids=["lora", "dora", "dora_of_queries_too", "lora_bias", "biases", "saved_beside_it"],
)
def test_an_adapter_of_what_is_absorbed(world: World, fields: dict) -> None:
    assert world.agree(world.train(LoraConfig(r=4, lora_alpha=9, **fields), seed=11))


def test_dora_where_saved_queries_stand_beside_it(world: World) -> None:
    """The scale of keys is the queries', whose layer is replaced."""
    config = LoraConfig(r=4, use_dora=True, target_modules=["kv_b_proj"], modules_to_save=["q_b_proj"])
    assert world.agree(world.train(config, seed=12))


def test_a_mixture(world: World) -> None:
    config = LoraConfig(r=3, target_modules="all-linear")
    paths = [world.train(config, seed=seed) for seed in (21, 22)]
    weights = (0.7, -0.4)
    names = [world.load(path).lora_name for path in paths]
    mixed = LoRARequest("mixture", adapters=list(zip(names, weights, strict=True)))
    oracle = Expected(world, *paths, weights=weights)
    for output in ask(world.llm, world.prompts, mixed):
        oracle.check(output)
    for path in paths:
        world.llm.unload_lora_adapter(path.name)


def test_it_cannot_be_replaced(world: World) -> None:
    path = world.train(LoraConfig(target_modules=["o_proj"], modules_to_save=["kv_b_proj"]))
    with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.kv_b_proj: its weights take LoRA, and cannot be"):
        world.load(path)
