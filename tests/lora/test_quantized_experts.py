"""Adapters on experts of rows of bytes, of several kinds in one layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, LoRARequest, SamplingParams
from tests.lora.adapter_files import nothing_left, write
from tests.lora.quantized_world import Kinds, QuantizedWorld, quantized_checkpoint

MOE = "Qwen3MoeForCausalLM"
SIZES = {"num_experts": 8, "moe_intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
# Kinds that are multiplied as floats: the oracle has one parameter of all experts, whose inputs nothing rounds.
FLOATS: Kinds = {r"experts\.0\.gate": "F16", r"experts\.\d+\.(gate|down)_proj": "AFFINE4", "q_proj": "Q8_0"}
ANY: Kinds = {
    r"experts\.[02]\.gate": "Q4_0", r"experts\.\d+\.gate": "Q4_K", r"experts\.1\.up": "AFFINE4",
    r"experts\.\d+\.up": "Q8_0",
    r"experts\.[03]\.down": "Q6_K", r"experts\.[12]\.down": "Q8_0", "_proj": "Q8_0", "embed_tokens": "Q8_0",
}  # fmt: skip
LAYERS = ("gate_proj", "up_proj", "down_proj")
Worlds = Callable[..., QuantizedWorld]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"], "use_rslora": True},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "gate.weight"]},
    ],
    ids=str,
)
def test_adapters_of_experts(quantized_worlds: Worlds, fields: dict[str, Any]) -> None:
    world = quantized_worlds(MOE, FLOATS, "as_published", **SIZES)
    assert world.agree(world.train(LoraConfig(r=3, **fields)))


def by_expert(rank: int, seed: int, experts: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for expert in range(experts):
            for name in LAYERS:
                path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                made[f"{path}.lora_A.weight"] = torch.randn(rank, 256, generator=generator) / 16
                made[f"{path}.lora_B.weight"] = torch.randn(256, rank, generator=generator) * 0.2
    return made


def test_a_row_takes_no_others_adapter(quantized_method: None, tmp_path) -> None:
    """Promise 1: alone, in company of others and of mixtures, in chunks and preempted, the same bits."""
    _, path = quantized_checkpoint(tmp_path / "base", MOE, ANY, "as_published", **SIZES)
    folders = {}
    for name, rank in (("one", 2), ("two", 5)):
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(LAYERS)}
        folders[name] = write(tmp_path / name, fields, by_expert(rank, rank))
    kinds = [None, LoRARequest("one"), LoRARequest("two"),
             LoRARequest("both", adapters=[("one", 0.7), ("two", -0.4)])]  # fmt: skip
    rng = random.Random(2)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 97) for _ in range(rng.randint(1, 30))]} for _ in range(12)]
    adapters = [kinds[number % 4] for number in range(12)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)

    def opened(**settings: Any) -> LLM:
        llm = LLM(str(path), enable_lora=True, skip_tokenizer_init=True, **settings)
        for name, folder in folders.items():
            llm.load_lora_adapter(name, str(folder))
        return llm

    def answers(llm: LLM, chosen: list[int]) -> list[Any]:
        outputs = llm.generate(
            [prompts[i] for i in chosen], params, lora_request=[adapters[i] for i in chosen], use_tqdm=False
        )
        nothing_left(llm)
        llm.llm_engine.check_integrity()
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    llm = opened(num_gpu_blocks_override=200, enable_prefix_caching=False)
    alone = [answers(llm, [i])[0] for i in range(12)]
    assert len({repr(one) for one in alone}) == 12
    for settings in ({"max_num_batched_tokens": 13}, {"block_size": 4, "num_gpu_blocks_override": 24}):
        llm = opened(**{"num_gpu_blocks_override": 200, **settings})
        assert answers(llm, list(range(12))) == alone
    assert llm.llm_engine.scheduler.num_preemptions
