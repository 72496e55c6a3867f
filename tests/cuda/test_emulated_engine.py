"""The whole engine on the GPU's kernels, in their emulation: against transformers and PEFT, and its promise.

What a GPU adds besides kernels is here too: the step's numbers in one copy, padded decode steps, tokens drawn where the
logits lie, and steps that are started before the tokens of the step before are known.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, LoRARequest, SamplingParams
from quire.kernels import backends, reference
from quire.platform.execution.staging import Staging
from tests.lora import adapter_files, peft_world
from tests.lora.adapter_files import write
from tests.lora.test_expert_adapters import by_expert, config
from tests.models import tiny
from tests.multimodal import tiny_vision
from tests.platform.conftest import make_llama
from tests.platform.engine.parity import by_transformers

STEPS = 5


@pytest.fixture
def emulated_engine(engine_on_emulated_cuda: None) -> Iterator[Callable[..., LLM]]:
    """Makes engines whose kernels are the GPU's."""

    def make(path: Any, **settings: Any) -> LLM:
        return as_on_a_gpu(LLM(str(path), debug=True, **{"num_gpu_blocks_override": 64, **settings}))

    yield make


def as_on_a_gpu(llm: LLM) -> LLM:
    runner = llm.llm_engine.executor.runner
    runner._staging, runner.looks_ahead = Staging(runner.device), True
    decode = runner._decode
    decode.room = lambda chunks: (-(-len(chunks) // 4) * 4, 16)  # type: ignore[method-assign]
    return llm


def prompts(vocab: int, count: int = 3) -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab) for _ in range(8)]
    return [shared + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 9))] for _ in range(count)]


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("LlamaForCausalLM", "gqa"),
        ("LlamaForCausalLM", "tied"),
        ("LlamaForCausalLM", "rope_dynamic"),
        ("Qwen2ForCausalLM", "mqa"),
        ("OPTForCausalLM", "post_norm"),
        ("GPT2LMHeadModel", "relu"),
        ("MixtralForCausalLM", "as_published"),
        ("Qwen2MoeForCausalLM", "as_published"),
        ("GptOssForCausalLM", "as_published"),
        ("DeepseekV2ForCausalLM", "v2"),
        ("MiniCPM3ForCausalLM", "as_published"),
    ],
)
def test_text(emulated_engine, tmp_path: Path, architecture: str, variant: str) -> None:
    oracle = tiny.make(architecture, variant).double()
    llm = emulated_engine(
        tiny.build(architecture, variant, tmp_path), max_num_batched_tokens=13, skip_tokenizer_init=True
    )
    batch = prompts(oracle.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    for ids, output in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
        answer = output.outputs[0].token_ids
        assert answer == by_transformers(oracle, ids, answer, token_by_token=True)[0]


def test_bfloat16_is_as_close_to_float64_as_transformers_is(emulated_engine, tmp_path: Path) -> None:
    path = tiny.build("LlamaForCausalLM", "gqa", tmp_path)
    llm = emulated_engine(path, dtype="bfloat16", skip_tokenizer_init=True)
    rounded = tiny.make("LlamaForCausalLM", "gqa").to(torch.bfloat16)
    exact = copy.deepcopy(rounded).double()
    batch = prompts(rounded.config.vocab_size, 6)
    ours, theirs = [], []
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for ids, output in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
        truth, half = (by_transformers(model, ids, [0])[1] for model in (exact, rounded))
        for place in range(1, len(ids)):
            expected = float(truth[place - 1, ids[place]])
            ours.append(abs(output.prompt_logprobs[place][ids[place]].logprob - expected))
            theirs.append(abs(float(half[place - 1, ids[place]]) - expected))
    assert sum(ours) <= 1.1 * sum(theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_request_alone_and_in_a_crowd(emulated_engine, tmp_path: Path, dtype: str) -> None:
    """Bit by bit: logprobs, greedy and drawn tokens, whatever the chunks, the pool and the neighbours."""
    make_llama(tmp_path)
    batch = prompts(384, 6)

    def params(index: int) -> SamplingParams:
        kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": index}]
        more = {"logprobs": 2} if index % 3 == 0 else {}
        return SamplingParams(max_tokens=STEPS + index % 3, ignore_eos=True, **kinds[index % 2], **more)

    def answers(llm: LLM, chosen: list[int]) -> dict[int, Any]:
        given = [{"prompt_token_ids": batch[i]} for i in chosen]
        outputs = llm.generate(given, [params(i) for i in chosen], use_tqdm=False)
        llm.llm_engine.check_integrity()
        assert llm.llm_engine.pool.num_owned == 0
        return {i: (o.outputs[0].token_ids, o.outputs[0].logprobs) for i, o in zip(chosen, outputs, strict=True)}

    llm = emulated_engine(tmp_path, dtype=dtype, enable_prefix_caching=False)
    alone = {i: answers(llm, [i])[i] for i in range(6)}
    for settings in ({"max_num_batched_tokens": 7}, {"num_gpu_blocks_override": 7, "block_size": 4}):
        crowd = emulated_engine(tmp_path, dtype=dtype, **settings)
        assert answers(crowd, list(range(6))) == alone
    assert crowd.llm_engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", ["plain", "dora", "saved", "words", "trained_tokens"])
def test_adapters(emulated_engine, tmp_path: Path, kind: str) -> None:
    """As the reference kernels have them, which `tests/lora` compares with PEFT."""
    make_llama(tmp_path / "model")
    folder = getattr(adapter_files, kind)(tmp_path / "adapter")
    batch = [{"prompt_token_ids": ids} for ids in prompts(384, 3)]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    adapters = [LoRARequest("one", 1, str(folder)), None, LoRARequest("one", 1, str(folder))]

    def logprobs(llm: LLM) -> list[list[float]]:
        outputs = llm.generate(batch, params, lora_request=adapters, use_tqdm=False)
        return [
            [step[token].logprob for token, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
            for o in outputs
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "backend", lambda: reference)
        expected = logprobs(LLM(str(tmp_path / "model"), enable_lora=True))
    found = logprobs(emulated_engine(tmp_path / "model", enable_lora=True))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)


def test_adapters_by_peft(emulated_engine, tmp_path: Path) -> None:
    world = peft_world.text_world(tmp_path, "LlamaForCausalLM", "gqa")
    path = world.train(LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "v_proj", "down_proj"]))
    as_on_a_gpu(world.llm)
    outputs = peft_world.ask(world.llm, world.prompts, LoRARequest("one", 1, str(path)))
    expected = peft_world.Expected(world, path)
    for output in outputs:
        expected.check(output)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_latents_by_peft(
    emulated_engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dora: bool
) -> None:
    """Of what queries and outputs absorb, too."""
    monkeypatch.setattr(peft_world, "STEPS", STEPS)
    world = peft_world.text_world(tmp_path, "YoutuForCausalLM", "biases", num_hidden_layers=2)
    as_on_a_gpu(world.llm)
    assert world.agree(world.train(LoraConfig(r=3, target_modules=["kv_b_proj", "o_proj"], use_dora=dora), seed=3))


def test_adapters_of_experts_by_peft(emulated_engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peft_world, "STEPS", STEPS)
    world = peft_world.text_world(tmp_path, "MixtralForCausalLM", "as_published", num_hidden_layers=2)
    as_on_a_gpu(world.llm)
    parameters = ["mlp.experts.gate_up_proj", "down_proj"]
    assert world.agree(world.train(LoraConfig(r=3, target_modules=["q_proj"], target_parameters=parameters), seed=3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_alone_and_in_a_crowd(emulated_engine, tmp_path: Path, dtype: str) -> None:
    """Requests of adapters of experts, of a mixture of them and of none: bit by bit."""
    path = tiny.build("MixtralForCausalLM", "as_published", tmp_path / "model", num_hidden_layers=2)
    folders = {name: write(tmp_path / name, config(rank), by_expert(rank, rank)) for name, rank in (("a", 2), ("b", 9))}
    one, two = LoRARequest("a"), LoRARequest("b")
    uses = [one, None, two, LoRARequest("both", adapters=(("a", 0.5), ("b", -1.0)))]
    batch = prompts(97, 4)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)

    def engine(**settings: Any) -> LLM:
        llm = emulated_engine(path, dtype=dtype, skip_tokenizer_init=True, enable_lora=True, **settings)
        for name, folder in folders.items():
            llm.load_lora_adapter(name, str(folder))
        return llm

    def ask(llm: LLM, chosen: list[int]) -> list[Any]:
        given = [{"prompt_token_ids": batch[i]} for i in chosen]
        outputs = llm.generate(given, params, lora_request=[uses[i] for i in chosen], use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    crowd = ask(engine(max_num_batched_tokens=11), list(range(4)))
    calm = engine(enable_prefix_caching=False)
    assert crowd == [ask(calm, [i])[0] for i in range(4)]
    uses[:] = [None] * 4
    plain = ask(calm, [0, 1])
    assert plain[1] == crowd[1] and plain[0] != crowd[0]


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("LlavaForConditionalGeneration", "clip"), ("Qwen2VLForConditionalGeneration", "mrope")],
)
def test_images(emulated_engine, tmp_path: Path, architecture: str, variant: str) -> None:
    oracle = tiny_vision.Oracle(architecture, variant)
    llm = emulated_engine(tiny_vision.build(architecture, variant, tmp_path, oracle.model), num_gpu_blocks_override=200)
    ids = [5, 6, tiny_vision.IMAGE, 7, 8]
    image = tiny_vision.picture(3, (53, 47))
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"image": image}}, params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == oracle.answer(ids, [image], STEPS)[1]
