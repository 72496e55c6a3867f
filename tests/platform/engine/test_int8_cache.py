"""kv_cache_dtype="int8": the same bits in any company, tokens near those of floats, and twice the room."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface, LlamaForCausalLM
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from quire import LLM, BeamSearchParams, QuireError, SamplingParams
from quire.config import CacheConfig
from quire.platform.execution import host_cache, worker
from tests.models import tiny
from tests.platform.engine import test_promise as promise
from tests.platform.engine.parity import check_forks

pytestmark = pytest.mark.usefixtures("one_thread")

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}


@pytest.fixture(scope="module", params=["tiny_path", "tiny_bf16_path"], ids=["fp32", "bf16"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def alone(path: str, one_thread: None) -> dict[int, Any]:
    llm = LLM(path, enable_prefix_caching=False, max_num_batched_tokens=512, **INT8)
    return {i: promise.answers(llm, [i])[i] for i in range(promise.REQUESTS)}


def test_a_crowd_any_chunking_and_prefix_hits(path: str, alone: dict[int, Any]) -> None:
    """In chunks, tokens see their neighbours' keys as the cache has them, or else these bits would change."""
    for budget in (11, 2048):
        llm = LLM(path, max_num_batched_tokens=budget, debug=True, **INT8)
        for _ in range(2):
            assert promise.answers(llm, list(range(promise.REQUESTS))) == alone
        again = llm.generate({"prompt_token_ids": promise.prompts()[2]}, promise.params(2), use_tqdm=False)[0]
        assert again.num_cached_tokens > 0


@pytest.mark.parametrize("swapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_preemption(path: str, alone: dict[int, Any], swapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if swapped:
        monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: 64)
        monkeypatch.setattr(host_cache, "_PIECE_BYTES", 5_000)
    llm = LLM(path, block_size=8, num_gpu_blocks_override=30, debug=True, **INT8)
    assert promise.answers(llm, list(range(promise.REQUESTS))) == alone
    scheduler = llm.llm_engine.scheduler
    assert (scheduler.num_swaps if swapped else scheduler.num_preemptions) > 0


def test_steps_through_python_are_those_that_are_recorded(path: str, alone: dict[int, Any]) -> None:
    assert promise.answers(LLM(path, enforce_eager=True, **INT8), [0, 1, 2, 3]) == {i: alone[i] for i in range(4)}


@pytest.mark.slow
def test_a_process_of_its_own(path: str, alone: dict[int, Any]) -> None:
    llm = LLM(path, block_size=8, num_gpu_blocks_override=30, max_num_batched_tokens=13, executor="process", **INT8)
    assert promise.answers(llm, list(range(promise.REQUESTS))) == alone
    llm.llm_engine.close()


@pytest.mark.slow
def test_beams(path: str) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in promise.prompts(6)]

    def run(**settings: Any) -> list[Any]:
        outputs = LLM(path, **INT8, **settings).beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12))
        return [(beam.tokens, beam.cum_logprob) for output in outputs for beam in output.sequences]

    assert run(num_gpu_blocks_override=60, block_size=4, max_num_batched_tokens=9, debug=True) == run()


def test_sleep(path: str, alone: dict[int, Any]) -> None:
    llm = LLM(path, **INT8)
    chosen = [0, 1, 2, 3]
    assert promise.answers(llm, chosen) == {i: alone[i] for i in chosen}
    llm.sleep(1)
    llm.wake_up()
    assert promise.answers(llm, chosen) == {i: alone[i] for i in chosen}


# Windows, latents, and, more slowly, sinks, ALiBi, soft caps, chunks of attention, one head for all, states.
FAMILIES = [
    ("MistralForCausalLM", "window", "bfloat16"),
    ("DeepseekV2ForCausalLM", "v2", "bfloat16"),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("LlamaForCausalLM", "odd_sizes", "float16"),
            ("GptOssForCausalLM", "as_published", "bfloat16"),
            ("BloomForCausalLM", None, "float32"),
            ("Gemma2ForCausalLM", None, "bfloat16"),
            ("Gemma3ForCausalLM", None, "float32"),
            ("Llama4ForCausalLM", None, "float32"),
            ("GPTBigCodeForCausalLM", None, "bfloat16"),
            ("FalconH1ForCausalLM", None, "float32"),
        )
    ),
]


@pytest.mark.parametrize(("architecture", "variant", "dtype"), FAMILIES)
def test_families(tmp_path: Path, architecture: str, variant: str | None, dtype: str) -> None:
    variant = variant or next(iter(tiny.rows.entry(architecture)[2]))
    check_forks(tiny.build(architecture, variant, tmp_path), dtype, **INT8)


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """What int8 leaves of rows."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def over_int8(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
    """transformers' attention, of keys and values as the cache has them."""
    return eager_attention_forward(module, query, as_stored(key), as_stored(value), *rest, **more)


def test_scores_are_those_of_transformers_over_such_keys(tmp_path: Path) -> None:
    """In the prompt's own step too, whose tokens see one another's keys as they are stored."""
    path = tiny.build("LlamaForCausalLM", "gelu", tmp_path)
    rng = random.Random(6)
    prompts = [[rng.randrange(3, 97) for _ in range(60)] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    theirs = LlamaForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ALL_ATTENTION_FUNCTIONS.register("over_int8", over_int8)
    AttentionMaskInterface.register("over_int8", eager_mask)
    differences = {}
    for kept in ("auto", "int8"):
        llm = LLM(str(path), skip_tokenizer_init=True, dtype="float32", kv_cache_dtype=kept)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        theirs.set_attn_implementation("eager" if kept == "auto" else "over_int8")
        ours, wanted = [], []
        for ids, output in zip(prompts, outputs, strict=True):
            with torch.inference_mode():
                logprobs = theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            wanted += logprobs[range(59), ids[1:]].tolist()
            assert output.prompt_logprobs is not None
            ours += [place[ids[i]].logprob for i, place in enumerate(output.prompt_logprobs) if place]
        differences[kept] = (torch.tensor(ours) - torch.tensor(wanted)).abs()
    assert differences["auto"].max() < 1e-4
    # A number that lies between two whole ones may become the other one here and there.
    assert differences["int8"].median() < 1e-4 and differences["int8"].mean() < 5e-3


def test_the_pool_has_nearly_twice_the_tokens(tmp_path: Path) -> None:
    path = str(tiny.build("LlamaForCausalLM", "gelu", tmp_path, head_dim=64))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20}
    facts = [LLM(path, **settings, kv_cache_dtype=kept).llm_engine.executor.facts for kept in ("auto", "int8")]
    assert 1.85 < facts[1].num_blocks / facts[0].num_blocks < 1.9  # 128 bytes a row, or 68
    assert all(0.98 * (1 << 20) < one.pool_bytes <= 1 << 20 for one in facts)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("fp8", "int8"),
        ("fp8_e4m3", "int8"),
        ("bfloat16", "kv_cache_dtype='auto'"),
        ("int4", "auto or int8"),
        (8, "auto or int8"),
    ],
)
def test_other_dtypes_are_refused_with_the_way_out(value: Any, says: str) -> None:
    with pytest.raises(QuireError, match=f"kv_cache_dtype={value!r}.*{says}"):
        CacheConfig(kv_cache_dtype=value)
