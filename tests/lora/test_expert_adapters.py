"""Adapters of experts: both of the forms that they come in, against PEFT; mixtures of them in a step; refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import AdapterError
from tests.lora.adapter_files import Tensors, write
from tests.lora.peft_world import Expected, World
from tests.models.tiny import build

Worlds = Callable[..., World]
MIXTRAL = "MixtralForCausalLM"
HIDDEN, INNER, EXPERTS, LAYERS = 32, 48, 8, 2
SIZES = {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER)}


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds(MIXTRAL, "as_published", num_hidden_layers=LAYERS)


def by_expert(rank: int, seed: int, layers: int = LAYERS, experts: int = EXPERTS) -> Tensors:
    """As transformers' older versions called the layers."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(layers):
        for e in range(experts):
            for name, (inner, outer) in SIZES.items():
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{e}.{name}"
                made[f"{path}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) / inner**0.5
                made[f"{path}.lora_B.weight"] = torch.randn(outer, rank, generator=generator) * 0.3
    return made


def config(rank: int, targets: Any = ("w1", "w2", "w3"), **more: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **more}


def test_layers_of_single_experts(world: World) -> None:
    """PEFT makes of them what it holds itself."""
    path = write(world.folder / "by_expert", config(3), by_expert(3, 1))
    assert world.agree(path)


@pytest.mark.parametrize("parameters", [["mlp.experts.gate_up_proj"], ["down_proj", "gate.weight"]])
def test_parameters_of_all_experts(world: World, parameters: list[str]) -> None:
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}, "use_rslora": True}
    given = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=parameters, **patterns)
    assert world.agree(world.train(given, seed=3))


@torch.no_grad()
def test_dora_of_single_experts(world: World) -> None:
    """What PEFT cannot do any more: it is merged here, by the formula (arXiv:2402.09353)."""
    made = by_expert(3, 5)
    merged = copy.deepcopy(world.theirs)
    generator = torch.Generator().manual_seed(2)
    for layer in range(LAYERS):
        own = merged.model.layers[layer].mlp.experts
        gates, ups = own.gate_up_proj.data.split(INNER, 1)
        for e in range(EXPERTS):
            for name, weight in (("w1", gates[e]), ("w3", ups[e]), ("w2", own.down_proj.data[e])):
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{e}.{name}"
                total = weight + 2.0 * made[f"{path}.lora_B.weight"] @ made[f"{path}.lora_A.weight"]
                lengths = total.norm(dim=1)
                magnitude = lengths * (0.7 + 0.6 * torch.rand(len(total), generator=generator))
                made[f"{path}.lora_magnitude_vector"] = magnitude
                weight.copy_(total * (magnitude / lengths)[:, None])
    path = write(world.folder / "dora", config(3, use_dora=True), made)
    request = world.load(path)
    outputs = world.llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in world.prompts],
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, prompt_logprobs=1),
        lora_request=request,
        use_tqdm=False,
    )
    world.llm.unload_lora_adapter(path.name)
    oracle = Expected(world, None)
    oracle.model = merged.double()
    for output in outputs:
        oracle.check(output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_takes_no_others_adapter(dtype: str, tmp_path: Path) -> None:
    """Requests of two adapters, of a mixture of them and of none, in a crowd, have the bits that each has alone."""
    path = str(build(MIXTRAL, "as_published", tmp_path / "base"))
    folders = {
        name: write(tmp_path / name, config(rank), by_expert(rank, rank, layers=3))
        for name, rank in (("one", 2), ("two", 5))
    }

    def engine(**settings: Any) -> LLM:
        llm = LLM(path, dtype=dtype, skip_tokenizer_init=True, enable_lora=True, **settings)
        for name, folder in folders.items():
            llm.load_lora_adapter(name, str(folder))
        return llm

    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (3 + 5 * i,), generator=rng).tolist() for i in range(8)]
    one, two = LoRARequest("one"), LoRARequest("two")
    both = LoRARequest("both", adapters=(("one", 0.5), ("two", -1.0)))
    uses = [one, None, two, both, None, one, two, None]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)

    def ask(llm: LLM, chosen: list[int]) -> list[Any]:
        given = [{"prompt_token_ids": prompts[i]} for i in chosen]
        outputs = llm.generate(given, params, lora_request=[uses[i] for i in chosen], use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    calm = engine(enable_prefix_caching=False)
    crowd = ask(engine(block_size=4, num_gpu_blocks_override=40, max_num_batched_tokens=11), list(range(8)))
    assert crowd == [ask(calm, [i])[0] for i in range(8)]
    without = LLM(path, dtype=dtype, skip_tokenizer_init=True)
    plain = without.generate([{"prompt_token_ids": prompts[i]} for i in range(8)], params, use_tqdm=False)
    same = [crowd[i][0] == plain[i].outputs[0].token_ids for i in range(8)]
    assert [i for i in range(8) if uses[i] is None and not same[i]] == [] and not all(same)


def test_what_does_not_fit_is_refused(world: World) -> None:
    good = by_expert(2, 1)
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.3.w1"
    fused = "base_model.model.model.layers.0.mlp.experts"
    count = [0]

    def refused(fields: dict[str, Any], content: Tensors) -> str:
        count[0] += 1
        folder = write(world.folder / f"bad{count[0]}", fields, content)
        with pytest.raises(AdapterError) as caught:
            world.llm.load_lora_adapter("bad", str(folder))
        return str(caught.value)

    some = {key: value for key, value in good.items() if not key.startswith(name)}
    assert "missing: 2 (model.layers.0.block_sparse_moe.experts.3.w1.lora_A" in refused(config(2), some)
    long = {**good, f"{name}.lora_A.weight": torch.zeros(2, HIDDEN + 1)}
    assert "lora_A.weight has shape [2, 33]" in refused(config(2), long)
    parameters = {"target_parameters": ["experts.down_proj"]}
    pair = {f"{fused}.lora_A.weight": torch.zeros(2 * EXPERTS, INNER), f"{fused}.lora_B.weight": torch.zeros(HIDDEN, 4)}
    assert "lora_B of shape [32, 4]" in refused(config(2, [], **parameters), pair)
    pair[f"{fused}.lora_B.weight"] = torch.zeros(HIDDEN, 2 * EXPERTS)
    twice = {**pair, **{key.replace("experts.", "experts.base_layer."): value.clone() for key, value in pair.items()}}
    assert "has the shares of one parameter twice" in refused(config(2, [], **parameters), twice)
    other = refused(config(2, [], target_parameters=["embed_tokens.weight"]), pair)
    assert "embed_tokens.weight, which is no linear layer's weight" in other
    assert "must be a list of names" in refused(config(2, [], target_parameters="down_proj"), pair)
    whole = {f"{name}.weight": torch.ones(INNER, HIDDEN)}
    saved = config(2, ["q_proj"], modules_to_save=["experts.3.w1"])
    for layer in range(LAYERS):
        path = f"base_model.model.model.layers.{layer}"
        whole[f"{path}.block_sparse_moe.experts.3.w1.weight"] = torch.ones(INNER, HIDDEN)
        whole[f"{path}.self_attn.q_proj.lora_A.weight"] = torch.zeros(2, HIDDEN)
        whole[f"{path}.self_attn.q_proj.lora_B.weight"] = torch.zeros(32, 2)
    assert "an expert's weights take LoRA, and cannot be replaced" in refused(saved, whole)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["GraniteMoeForCausalLM", "PhimoeForCausalLM"])
def test_other_names(worlds: Worlds, architecture: str) -> None:
    """Families that hold or call their experts in ways of their own."""
    world = worlds(architecture, "as_published", num_hidden_layers=2, tie_word_embeddings=False)
    given = LoraConfig(r=3, target_modules=["v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    assert world.agree(world.train(given, seed=3))
