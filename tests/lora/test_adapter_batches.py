"""Requests of the base model and of several adapters in one batch: each gets its own answer, and blocks of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, BeamSearchParams, LoRARequest
from tests.lora import adapter_files as files
from tests.lora.conftest import Worlds
from tests.lora.peft_world import Expected, Prompt, ask

REQUESTS = 16
RANKS: list[dict[str, Any]] = [
    {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "target_modules": ["k_proj", "down_proj"]},
    {"r": 8, "target_modules": "all-linear"},
    {"r": 33, "target_modules": ["o_proj", "gate_proj", "q_proj"], "use_rslora": True},
    {"r": 64, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 7}, "layers_to_transform": 1},
]
KINDS: list[dict[str, Any]] = [
    {"r": 1, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "input_layernorm"]},
    {"r": 4, "target_modules": "all-linear", "use_dora": True, "trainable_token_indices": [30, 3, 96, 50, 20, 11]},
    {"r": 8, "target_modules": ["k_proj", "embed_tokens", "lm_head"], "use_dora": True},
    {"r": 33, "target_modules": ["up_proj", "q_proj", "lm_head"], "lora_bias": True},
    {"r": 64, "target_modules": ["gate_proj"], "modules_to_save": ["down_proj", "embed_tokens", "k_proj", "norm"]},
]
GPT2: list[dict[str, Any]] = [
    {"r": 1, "target_modules": ["c_attn"], "modules_to_save": ["wpe", "ln_f"]},
    {"r": 4, "target_modules": ["c_attn", "wte", "wpe"], "use_dora": True},
    {"r": 8, "target_modules": "all-linear", "bias": "all"},
    {"r": 33, "target_modules": ["c_fc", "wte"]},
    {"r": 64, "target_modules": ["c_proj"], "trainable_token_indices": [30, 3, 96, 50, 20, 11]},
]


def shared_prompts(vocab: int) -> list[Prompt]:
    """Several begin alike, and so do some of the same adapter."""
    rng = random.Random(8)
    shared = [rng.randrange(3, vocab) for _ in range(20)]
    return [
        (shared[: rng.choice([12, 16, 20])] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 20))], [])
        for _ in range(REQUESTS)
    ]


@pytest.mark.parametrize(
    ("architecture", "variant", "adapters"),
    [("LlamaForCausalLM", "gqa", RANKS), ("LlamaForCausalLM", "gqa", KINDS), ("GPT2LMHeadModel", "gelu_new", GPT2)],
    ids=["ranks", "kinds", "gpt2"],
)
@pytest.mark.parametrize("max_loras", [None, 3])
def test_base_and_five_adapters_in_one_batch(
    worlds: Worlds, architecture: str, variant: str, adapters: list[dict[str, Any]], max_loras: int | None
) -> None:
    """16 requests, a token budget of 13, a prefix cache, and too few blocks, so that some are preempted. With
    max_loras, adapters have to make room for each other too."""
    world = worlds(architecture, variant)
    paths = [None, *(world.train(LoraConfig(**fields), seed) for seed, fields in enumerate(adapters))]
    llm = LLM(
        str(world.path), enable_lora=True, max_loras=max_loras, skip_tokenizer_init=True, max_num_batched_tokens=13,
        block_size=4, num_gpu_blocks_override=40, debug=True,
    )  # fmt: skip
    prompts = shared_prompts(world.theirs.config.vocab_size)
    owners = [paths[number % 3 + number // 8 * 3] for number in range(REQUESTS)]  # soon again: blocks do not live long
    requests = [path and LoRARequest(path.name, lora_path=str(path)) for path in owners]
    # Those with prompt logprobs take no blocks from the cache.
    sampling = [{"prompt_logprobs": 1} if number % 5 == 0 else {"prompt_logprobs": None} for number in range(REQUESTS)]
    outputs = ask(llm, prompts, requests, each=sampling)
    engine = llm.llm_engine
    engine.check_integrity()
    assert engine.scheduler.num_preemptions > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert engine.pool.num_owned == 0
    oracles = {path: Expected(world, path) for path in paths}
    for path, output in zip(owners, outputs, strict=True):
        oracles[path].check(output)
    plain = ask(world.llm, prompts, None)
    differs = [a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True)]
    for path, other in zip(owners, differs, strict=True):
        assert other == (path is not None)
    for path in paths[1:]:
        llm.unload_lora_adapter(path.name)
    engine.check_integrity()
    assert not llm.list_lora_adapters()


def test_images_of_several_adapters_in_one_batch(worlds: Worlds) -> None:
    """The same image gives each adapter the features of its own tower."""
    world = worlds("LlavaForConditionalGeneration", "clip")
    configs = [
        LoraConfig(r=2, target_modules=["q_proj", "fc1", "patch_embedding"]),
        LoraConfig(r=9, target_modules=["linear_2", "down_proj"], use_dora=True),
        LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["embeddings", "multi_modal_projector"]),
        LoraConfig(r=4, target_modules=r".*language_model.*q_proj"),
    ]
    paths = [None, *(world.train(config, seed) for seed, config in enumerate(configs))]
    prompts = [prompt for prompt in world.prompts for _ in paths]
    owners = paths * len(world.prompts)
    requests = [path and LoRARequest(path.name, lora_path=str(path)) for path in owners]
    llm = LLM(
        str(world.path), enable_lora=True, max_num_batched_tokens=29, block_size=4, num_gpu_blocks_override=40,
        debug=True,
    )  # fmt: skip
    outputs = ask(llm, prompts, requests, each=[{"prompt_logprobs": None}] * len(prompts))
    assert llm.llm_engine.scheduler.num_preemptions > 0
    llm.llm_engine.check_integrity()
    oracles = {path: Expected(world, path) for path in paths}
    for path, (_, images), output in zip(owners, prompts, outputs, strict=True):
        oracles[path].check(output, images)
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    for number in range(0, len(answers), len(paths)):
        assert len({*answers[number : number + len(paths)]}) >= 4


def test_beams_of_an_adapter(worlds: Worlds) -> None:
    """Beams fork: all of a request's sequences are its adapter's."""
    world = worlds("LlamaForCausalLM", "gqa")
    paths = [None, *(world.train(LoraConfig(**fields), seed) for seed, fields in enumerate(KINDS[:2]))]
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    ids = world.prompts[0][0]
    owners = [path and LoRARequest(path.name, lora_path=str(path)) for path in paths]
    for path, output in zip(paths, world.llm.beam_search([ids] * 3, params, lora_request=owners), strict=True):
        expected = Expected(world, path).model.generate(
            input_ids=torch.tensor([ids]), num_beams=4, num_return_sequences=4, max_new_tokens=10, min_new_tokens=10,
            do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [beam.tokens for beam in output.sequences] == expected.sequences.tolist()
    for path in paths[1:]:
        world.llm.unload_lora_adapter(path.name)


@pytest.mark.parametrize("eager", [False, True])
def test_many_adapters_of_different_layers(path: Path, tmp_path: Path, eager: bool) -> None:
    """Each of twenty changes one layer, and most layers are changed by few: their tables have all slots, too."""
    names = [f"n{number}" for number in range(20)]
    for number, name in enumerate(names):
        files.plain(tmp_path / name, seed=number, targets=[files.ALL[number % len(files.ALL)]])
    owners = [None, *names]
    prompts = [files.prompt(seed, 3 + seed) for seed in range(len(owners))]
    alone = files.open_llm(path, enable_prefix_caching=False, max_loras=1)
    crowd = files.open_llm(path, enforce_eager=eager)
    for llm in (alone, crowd):
        for name in names:
            llm.load_lora_adapter(name, str(tmp_path / name))
    expected = [files.tokens(alone, [ids], owner)[0] for ids, owner in zip(prompts, owners, strict=True)]
    for _ in range(2):
        for first in range(6, len(owners), 3):  # a few after the others take their slots
            assert files.tokens(crowd, prompts[: first + 1], owners[: first + 1]) == expected[: first + 1]
    files.nothing_left(crowd)
