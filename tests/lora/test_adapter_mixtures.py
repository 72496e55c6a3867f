"""Mixtures of adapters with weights: PEFT's add_weighted_adapter(combination_type="cat"), or the deltas' plain sum."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from quire import LoRARequest
from tests.lora.conftest import Worlds
from tests.lora.peft_world import Expected, World, ask

LLAMA = ("LlamaForCausalLM", "gqa")
TIED = ("LlamaForCausalLM", "tied")
GPT2 = ("GPT2LMHeadModel", "gelu_new")
LLAVA = ("LlavaForConditionalGeneration", "clip")
A: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
B: dict[str, Any] = {"r": 9, "target_modules": ["q_proj", "up_proj"], "lora_alpha": 20}
C: dict[str, Any] = {"r": 2, "target_modules": ["k_proj", "embed_tokens", "lm_head"], "lora_alpha": 3}
D: dict[str, Any] = {"r": 3, "target_modules": ["embed_tokens", "q_proj"]}
CONV: list[dict[str, Any]] = [
    {"r": 4, "target_modules": ["c_attn", "c_proj", "wpe"], "fan_in_fan_out": True},
    {"r": 7, "target_modules": ["c_fc", "c_attn", "wte", "wpe"], "fan_in_fan_out": True},
]

CASES: dict[str, tuple[tuple[str, str], list[dict[str, Any]], list[float]]] = {
    "two": (LLAMA, [A, B], [0.7, 0.3]),
    "one_alone": (LLAMA, [A], [0.5]),
    "three": (LLAMA, [A, B, C], [0.5, 1.5, 1.0]),
    "negative": (LLAMA, [A, B], [1.0, -0.8]),
    "nothing_of_one": (LLAMA, [A, B], [0.0, 1.0]),
    "embeddings": (LLAMA, [C, D], [0.6, -0.9]),
    "tied_embeddings": (TIED, [C, D], [0.6, 0.7]),
    "conv1d": (GPT2, CONV, [0.6, 0.9]),
}


class Summed(Expected):
    """The base model with the weighted sum of the adapters' deltas in its weights."""

    def __init__(self, world: World, paths: Sequence[Path], weights: Sequence[float]) -> None:
        super().__init__(world, None)
        own = dict(self.model.named_parameters(remove_duplicate=False))
        fresh = {name: parameter.detach().clone() for name, parameter in own.items()}
        for path, weight in zip(paths, weights, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adapted = PeftModel.from_pretrained(copy.deepcopy(world.theirs), path).double()
            for name, module in adapted.get_base_model().named_modules():
                if hasattr(module, "get_delta_weight"):
                    fresh[f"{name}.weight"] += weight * module.get_delta_weight("default").detach()
        for name, value in fresh.items():  # which also unties
            owner = self.model.get_submodule(name.rpartition(".")[0])
            owner._parameters[name.rpartition(".")[2]] = torch.nn.Parameter(value)


def load(world: World, configs: Sequence[dict[str, Any]]) -> list[Path]:
    paths = [world.train(LoraConfig(**fields), seed) for seed, fields in enumerate(configs)]
    for path in paths:
        world.load(path)
    return paths


def check(world: World, paths: Sequence[Path], weights: Sequence[float], oracle: Expected) -> None:
    """The mixture beside the base model and each of its parts, in one batch."""
    pairs = [(path.name, weight) for path, weight in zip(paths, weights, strict=True)]
    owners = [None, LoRARequest("mixture", adapters=pairs), *(LoRARequest(path.name) for path in paths)]
    oracles = [Expected(world, None), oracle, *(Expected(world, path) for path in paths)]
    prompts = [prompt for prompt in world.prompts for _ in owners]
    outputs = ask(world.llm, prompts, owners * len(world.prompts))
    world.llm.llm_engine.check_integrity()
    for number, (output, (_, images)) in enumerate(zip(outputs, prompts, strict=True)):
        oracles[number % len(owners)].check(output, images)
    # Without prompt logprobs, blocks come from the cache: those of the same adapters in the same proportion.
    halves = LoRARequest("mixture", adapters=[(name, weight / 2 + 0.3) for name, weight in pairs])
    owners.insert(2, halves)
    prompts = [prompt for prompt in world.prompts for _ in owners]
    again = ask(world.llm, prompts, owners * len(world.prompts), each=[{"prompt_logprobs": None}] * len(prompts))
    assert all(output.num_cached_tokens > 0 for output in again[1 :: len(owners)])
    assert not any(output.num_cached_tokens for output in again[2 :: len(owners)])
    del again[2 :: len(owners)], owners[2]
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    mixed = [output.outputs[0].token_ids for output in outputs[1 :: len(owners)]]
    assert mixed != world.plain
    for place in range(2, len(owners)):
        same = mixed == [output.outputs[0].token_ids for output in outputs[place :: len(owners)]]
        assert not same or weights[place - 2] == 1.0
    for path in paths:
        world.llm.unload_lora_adapter(path.name)


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_is_peft_s_weighted_adapter(worlds: Worlds, name: str) -> None:
    model, configs, weights = CASES[name]
    world = worlds(*model)
    paths = load(world, configs)
    check(world, paths, weights, Expected(world, *paths, weights=weights))


@pytest.mark.parametrize(
    ("model", "configs", "weights"),
    [
        # PEFT scales what it has combined once more where use_rslora is set.
        (LLAMA, [{**A, "use_rslora": True}, {**B, "use_rslora": True}], [0.7, -0.3]),
        # It takes no patterns into account when it sizes the combination, nor lists together with patterns.
        (LLAMA, [{**A, "rank_pattern": {"q_proj": 11}}, {"r": 2, "target_modules": r".*\.1\..*proj"}], [0.7, 1.2]),
        (LLAMA, [{"r": 5, "target_modules": "all-linear", "alpha_pattern": {"q_proj": 3}}, C, D], [0.4, 0.4, 0.4]),
        (LLAVA, [{"r": 4, "target_modules": ["q_proj", "fc1"]}, {"r": 6, "target_modules": ["fc1", "linear_1"]}],
         [0.5, 0.8]),
    ],
    ids=["rslora", "patterns", "all_linear", "images"],
)  # fmt: skip
def test_a_mixture_is_the_sum_of_its_shares(
    worlds: Worlds, model: tuple[str, str], configs: list[dict[str, Any]], weights: list[float]
) -> None:
    world = worlds(*model)
    paths = load(world, configs)
    check(world, paths, weights, Summed(world, paths, weights))
