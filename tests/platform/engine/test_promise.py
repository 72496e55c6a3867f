"""Promise 1: a request's tokens and logprobs are bitwise the same whatever else is in the batch."""

from __future__ import annotations

import random

import pytest

from quire import LLM, SamplingParams, kernels
from tests.models.tiny import build
from tests.platform.conftest import make_llama
from tests.platform.engine.parity import check_forks

REQUESTS = 32


def prompts(count: int = REQUESTS) -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    own = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 60))] for _ in range(count)]
    return [shared[: rng.choice([0, 0, 17, 40])] + ids for ids in own]


def params(index: int) -> SamplingParams:
    """Every kind of request: greedy, sampled, filtered, penalised; with logprobs, so that these are compared too."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": index},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "seed": index},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    ]
    more = {"prompt_logprobs": 2} if index % 5 == 0 else {}
    return SamplingParams(max_tokens=12 + index % 7, ignore_eos=True, logprobs=3, **kinds[index % 4], **more)


def answers(llm: LLM, chosen: list[int]) -> dict[int, tuple]:
    """What each chosen request gives when they all run together."""
    batch = prompts()
    outputs = llm.generate(
        [{"prompt_token_ids": batch[i]} for i in chosen], [params(i) for i in chosen], use_tqdm=False
    )
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    return {
        i: (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for i, output in zip(chosen, outputs, strict=True)
    }


@pytest.fixture(scope="module", params=["tiny_path", "tiny_bf16_path"], ids=["fp32", "bf16"])
def path(request):
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def alone(path):
    llm = LLM(path, enable_prefix_caching=False, max_num_batched_tokens=512)
    return {i: answers(llm, [i])[i] for i in range(REQUESTS)}


@pytest.mark.parametrize("budget", [5, 13, 64, 2048])
@pytest.mark.parametrize("cached", [False, True])
def test_a_crowd_and_any_chunking(path, alone, budget, cached):
    llm = LLM(path, max_num_batched_tokens=budget, enable_prefix_caching=cached, debug=True)
    assert answers(llm, list(range(REQUESTS))) == alone


def test_prefix_hits(path, alone):
    llm = LLM(path, max_num_batched_tokens=64, debug=True)
    for _ in range(2):
        assert answers(llm, list(range(REQUESTS))) == alone
    again = llm.generate({"prompt_token_ids": prompts()[2]}, params(2), use_tqdm=False)[0]
    assert again.num_cached_tokens > 0, "the second round was to hit the prefix cache"


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_preemption(path, alone, block_size):
    llm = LLM(path, block_size=block_size, num_gpu_blocks_override=240 // block_size, debug=True)
    assert answers(llm, list(range(REQUESTS))) == alone
    assert llm.llm_engine.scheduler.num_preemptions > 0


def test_other_neighbours(path, alone):
    llm = LLM(path, max_num_seqs=7, debug=True)
    order = random.Random(1).sample(range(REQUESTS), 11)
    got = answers(llm, order)
    assert got == {i: alone[i] for i in order}


def test_threads_do_not_matter(path, alone):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert answers(LLM(path), [0, 1, 2, 3]) == {i: alone[i] for i in range(4)}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("LlamaForCausalLM", "odd_sizes"), ("OPTForCausalLM", "post_norm"), ("GPT2LMHeadModel", "gelu_new")],
)
def test_architectures_dtypes_and_forks(tmp_path, architecture, variant, dtype):
    check_forks(build(architecture, variant, tmp_path), dtype)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", *(pytest.param(one, marks=pytest.mark.slow) for one in ("OPTForCausalLM", "GPT2LMHeadModel"))],
)
def test_the_reference_kernels_keep_it_too(tmp_path, architecture, monkeypatch):
    variant = {"LlamaForCausalLM": "gelu", "OPTForCausalLM": "gelu", "GPT2LMHeadModel": "gelu_new"}[architecture]
    path = str(build(architecture, variant, tmp_path))
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    kernels.backend.cache_clear()
    try:
        rng = random.Random(8)
        batch = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(5)]
        wanted = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
        llm = LLM(path, skip_tokenizer_init=True, max_num_batched_tokens=7)
        assert kernels.backend().__name__.endswith("reference")
        crowd = [o.outputs[0] for o in llm.generate(batch, wanted, use_tqdm=False)]
        calm = LLM(path, skip_tokenizer_init=True, enable_prefix_caching=False)
        alone = [calm.generate([ids], wanted, use_tqdm=False)[0].outputs[0] for ids in batch]
        assert [(c.token_ids, c.logprobs) for c in crowd] == [(c.token_ids, c.logprobs) for c in alone]
    finally:
        kernels.backend.cache_clear()


def test_long_contexts(tmp_path):
    """Past the attention kernel's span of 512 keys."""
    make_llama(tmp_path, max_position_embeddings=2048)
    rng = random.Random(4)
    batch = [[rng.randrange(3, 320) for _ in range(n)] for n in (1300, 40, 515, 511, 700)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    calm = LLM(str(tmp_path), enable_prefix_caching=False, max_num_batched_tokens=4096)
    expected = [calm.generate([ids], params, use_tqdm=False)[0].outputs[0] for ids in batch]
    for budget, blocks in ((37, 1024), (300, 220)):
        llm = LLM(str(tmp_path), max_num_batched_tokens=budget, num_gpu_blocks_override=blocks)
        got = [o.outputs[0] for o in llm.generate(batch, params, use_tqdm=False)]
        assert [(c.token_ids, c.logprobs) for c in got] == [(c.token_ids, c.logprobs) for c in expected]
