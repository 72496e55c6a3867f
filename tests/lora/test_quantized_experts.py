"""Experts of rows of bytes, of several kinds in one layer: their products, and adapters on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, LoRARequest, SamplingParams, kernels
from quire.kernels import QuantizedWeight, RowKind, RowLayout
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, pack
from quire.kernels.experts import expert_segments
from tests.kernels.quantized_cases import random_weight
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_has_its_own_experts_product(dtype: torch.dtype) -> None:
    """Bit by bit that of `quantized_linear` alone, with what adapters add."""
    generator = torch.Generator().manual_seed(0)
    kinds = (RowKind.Q8_0, RowKind.Q4_K, RowKind.AFFINE8, RowKind.F16)
    weights = [
        [random_weight(RowLayout(kinds[(expert + place) % 4], 256), 24 + 8 * place, expert) for place in range(2)]
        for expert in range(4)
    ]
    biases: list[list[torch.Tensor | None]] = [[torch.randn(24, generator=generator).to(dtype), None] for _ in range(4)]
    tables = [[LoraTable(256, len(weight), dtype) for weight in own] for own in weights]
    for own in tables:
        for table in own:
            a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 256), (table.out_features, 3)))
            table.put(1, LoraWeights(a, pack(b), 0.5))
    starts = torch.tensor([0, 3, 3, 8, 12], dtype=torch.int32)
    tokens = torch.tensor([0, 2, 5, 0, 1, 2, 3, 4, 1, 3, 4, 5])
    x = torch.randn(12, 256, generator=generator).to(dtype)
    segments = LoraSegments.of([(0, 2, 1, 1.0), (3, 5, 1, -0.5)], 6)
    found = kernels.quantized_grouped_linear(x, starts, tokens, weights, biases, tables, segments)
    plain = kernels.quantized_grouped_linear(x, starts, tokens, weights, biases)
    assert found.shape == (12, 56) and not torch.equal(found, plain)
    for expert in range(4):
        for row in range(int(starts[expert]), int(starts[expert + 1])):
            own = expert_segments(segments, tokens[row : row + 1])
            alone = kernels.quantized_linear(
                x[row : row + 1], weights[expert], biases[expert], None, tables[expert], own
            )
            assert torch.equal(found[row], alone[0])
            alone = kernels.quantized_linear(x[row : row + 1], weights[expert], biases[expert])
            assert torch.equal(plain[row], alone[0])


def test_a_layout_that_does_not_fit_is_named() -> None:
    weight = QuantizedWeight(torch.zeros(4, 34, dtype=torch.uint8), RowLayout(RowKind.Q8_0, 32))
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows of 64 columns, got 32"):
        kernels.quantized_grouped_linear(
            torch.zeros(1, 64), starts, torch.zeros(1, dtype=torch.int64), [[weight]], [[None]]
        )


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
