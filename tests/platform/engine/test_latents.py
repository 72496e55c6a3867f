"""An engine whose pool holds latents: its size, its sleep, its blocks in main memory, its beams."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.platform.execution import host_cache, worker
from tests.models import tiny
from tests.models.rows.deepseek import LATENT

pytestmark = pytest.mark.usefixtures("one_thread")

_RNG = random.Random(4)
PROMPTS = [[_RNG.randrange(3, 97) for _ in range(_RNG.randint(5, 45))] for _ in range(8)]
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 4, "dtype": "bfloat16", "debug": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("DeepseekV2ForCausalLM", "v2", tmp_path_factory.mktemp("deepseek"))


def answers(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, ignore_eos=True, logprobs=2)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.llm_engine.check_integrity()
    return [(one.token_ids, one.logprobs) for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def calm(path: Path, one_thread: None) -> list[Any]:
    return answers(LLM(str(path), **SETTINGS, num_gpu_blocks_override=512, enable_prefix_caching=False))


def test_a_token_takes_a_latent_and_a_key_in_each_layer(path: Path) -> None:
    llm = LLM(str(path), **SETTINGS, num_gpu_blocks_override=64)
    row = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert llm.llm_engine.executor.facts.pool_bytes == 64 * 4 * LATENT["num_hidden_layers"] * row * 2
    sized = LLM(str(path), **SETTINGS, kv_cache_memory_bytes=100 * 4 * LATENT["num_hidden_layers"] * row * 2)
    assert sized.llm_engine.executor.facts.num_blocks == 100


def test_an_engine_wakes_up_with_the_same_bits(path: Path, calm: list[Any]) -> None:
    llm = LLM(str(path), **SETTINGS, num_gpu_blocks_override=512)
    model = llm.llm_engine.executor.runner.model
    assert answers(llm) == calm and len(model.derived) == LATENT["num_hidden_layers"]
    llm.sleep(1)
    assert not any(bool(one.any()) for one in (*model.parameters(), *model.derived)), "weights are still there"
    llm.wake_up()
    assert answers(llm) == calm


def test_blocks_in_main_memory(path: Path, calm: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: 64)
    monkeypatch.setattr(host_cache, "_PIECE_BYTES", 5_000)
    llm = LLM(str(path), **SETTINGS, num_gpu_blocks_override=40, max_num_batched_tokens=11)
    assert answers(llm) == calm
    assert llm.llm_engine.scheduler.num_swaps > 0


@pytest.mark.slow
def test_beams_copy_latents(path: Path) -> None:
    wanted = BeamSearchParams(beam_width=3, max_tokens=12)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def run(**settings: Any) -> list[Any]:
        llm = LLM(str(path), **SETTINGS, **settings)
        outputs = llm.beam_search(prompts, wanted)
        return [(beam.tokens, beam.cum_logprob) for output in outputs for beam in output.sequences]

    assert run(num_gpu_blocks_override=60, max_num_batched_tokens=9) == run(num_gpu_blocks_override=512)


@pytest.mark.slow
def test_a_process_of_its_own(path: Path, calm: list[Any]) -> None:
    llm = LLM(str(path), **SETTINGS, num_gpu_blocks_override=48, max_num_batched_tokens=13, executor="process")
    assert answers(llm) == calm
    llm.llm_engine.close()
