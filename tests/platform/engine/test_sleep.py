"""sleep() and wake_up(): memory goes and comes back, answers are what they were, and nothing runs meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.checkpoint.files import PICKLED, SINGLE
from quire.config.arguments import engine_config
from quire.demo import adapter_path, picture_path
from quire.errors import CheckpointError, EngineClosedError, RequestError, SleepingError
from quire.platform.engine.async_llm_engine import AsyncLLMEngine

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)


@pytest.fixture(scope="module")
def demo(one_thread) -> LLM:
    llm = LLM(enable_lora=True, num_gpu_blocks_override=512, debug=True)
    llm.load_lora_adapter("french", adapter_path("french"))
    return llm


def answers(llm: LLM) -> list[tuple]:
    """With and without an image, base model and adapters in one batch: tokens and logprobs."""
    picture = {"type": "image_pil", "image_pil": Image.open(picture_path())}
    seen = [{"role": "user", "content": [picture, {"type": "text", "text": "What do you see?"}]}]
    told = [{"role": "user", "content": "There is a red star. What color is the star?"}]
    adapters = [None, LoRARequest("french"), None, LoRARequest("french")]
    outputs = llm.chat([seen, seen, told, told], GREEDY, use_tqdm=False, lora_request=adapters)
    llm.llm_engine.check_integrity()
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


def cached(llm: LLM, prompt: str = "Once upon a time there was a red circle that rolled to the lake.") -> int:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0].num_cached_tokens


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_bitwise_what_they_were(demo, level):
    before = answers(demo)
    weights = {name: p.clone() for name, p in demo.llm_engine.executor.runner.model.named_parameters()}
    demo.sleep(level)
    assert demo.is_sleeping()
    assert not any(p.any() for p in demo.llm_engine.executor.runner.model.parameters()), "the weights are still there"
    demo.sleep(level)  # it does already
    demo.wake_up()
    demo.wake_up()
    assert not demo.is_sleeping()
    for name, parameter in demo.llm_engine.executor.runner.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert answers(demo) == before
    # An adapter that is loaded afterwards is what it would have been before.
    demo.load_lora_adapter("again", adapter_path("french"))
    assert demo.unload_lora_adapter("again") > 0


def test_nothing_runs_while_it_sleeps(demo):
    demo.sleep()
    conversation = [{"role": "user", "content": "What?"}]
    for attempt in (
        lambda: demo.generate("Once", GREEDY, use_tqdm=False),
        lambda: demo.chat(conversation, GREEDY, use_tqdm=False),
        lambda: demo.beam_search(["Once"], BeamSearchParams(beam_width=2, max_tokens=2)),
        lambda: demo.load_lora_adapter("shout", adapter_path("shout")),
        lambda: demo.generate(
            "Once", GREEDY, use_tqdm=False, lora_request=LoRARequest("shout", lora_path=adapter_path("shout"))
        ),
        lambda: demo.llm_engine.add_request("a", "Once", GREEDY),
    ):
        with pytest.raises(SleepingError, match=r"sleeps: wake_up\(\) first"):
            attempt()
    assert not demo.llm_engine.has_unfinished_requests()
    assert [adapter.name for adapter in demo.list_lora_adapters()] == ["french"]
    demo.wake_up(tags=["weights"])
    with pytest.raises(SleepingError):
        demo.generate("Once", GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"tags=\['scheduling'\]: are among weights, kv_cache"):
        demo.wake_up(tags=["scheduling"])
    demo.wake_up(tags=["kv_cache"])
    assert demo.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_when_it_does_not_sleep(demo):
    for level in (0, 3, "1", True, None):
        with pytest.raises(RequestError, match="level="):
            demo.sleep(level)
    engine = demo.llm_engine
    engine.add_request("a", "Once upon", GREEDY)
    engine.step()
    with pytest.raises(RequestError, match="1 requests have not finished"):
        demo.sleep()
    while engine.has_unfinished_requests():
        engine.step()
    with engine._sleep.awake(), pytest.raises(RequestError, match="an adapter is being loaded"):  # by another thread
        demo.sleep()
    assert not demo.is_sleeping()


def test_the_prefix_cache_is_forgotten(demo):
    cached(demo)
    assert cached(demo) > 0
    assert demo.reset_prefix_cache() is True
    assert cached(demo) == 0
    demo.sleep()
    demo.wake_up()
    assert cached(demo) == 0
    # Also while a request runs on such blocks: it goes on as if nothing had been.
    engine, prompt = demo.llm_engine, "Once upon a time there was a red circle"
    alone = demo.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    engine.add_request("a", prompt, GREEDY)
    outputs = engine.step()
    engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == alone
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks


def open_llm(path: Path, **settings) -> LLM:
    return LLM(str(path), num_gpu_blocks_override=32, **settings)


def test_files_that_changed_are_not_read_again(tiny_path, tmp_path):
    path = Path(shutil.copytree(tiny_path, tmp_path / "model"))
    llm = open_llm(path)
    before = llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    status = (path / SINGLE).stat()
    other = {name: tensor + 1 for name, tensor in load_file(path / SINGLE).items()}
    good = (path / SINGLE).read_bytes()
    llm.sleep()
    save_file(other, tmp_path / "other", metadata={"format": "pt"})
    (path / SINGLE).write_bytes((tmp_path / "other").read_bytes())  # the very file
    with pytest.raises(CheckpointError, match="files have changed"):
        llm.wake_up()
    assert llm.is_sleeping()
    (path / SINGLE).write_bytes(good)
    os.utime(path / SINGLE, ns=(status.st_atime_ns, status.st_mtime_ns))
    (path / SINGLE).rename(path / "elsewhere")  # it is open
    llm.wake_up()
    assert llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
    with pytest.raises(CheckpointError, match=SINGLE):
        llm.sleep()  # it could not wake up again
    (tmp_path / "other").rename(path / SINGLE)
    with pytest.raises(CheckpointError, match="files have changed"):
        llm.sleep()
    assert llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before


def test_weights_that_no_longer_fit(tiny_path, monkeypatch):
    llm = open_llm(tiny_path)
    before = llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr("quire.huge_pages.available_bytes", lambda device=None: 1000)
        with pytest.raises(CheckpointError, match="1,000 are available"):
            llm.wake_up()
    llm.wake_up()
    assert llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before


def test_pickled_weights_of_the_old_form(tiny_path, tmp_path):
    """Whose numbers are read from a copy that is made anew."""
    path = Path(shutil.copytree(tiny_path, tmp_path / "model"))
    torch.save(load_file(path / SINGLE), path / PICKLED, _use_new_zipfile_serialization=False)
    (path / SINGLE).unlink()
    llm = open_llm(path)
    before = llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.sleep()
    llm.wake_up()
    assert llm.generate("The red", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
    del llm
    gc.collect()


def test_of_an_engine_for_asyncio(tiny_path):
    """As vLLM's has it."""
    settings = {"model": str(tiny_path), "num_gpu_blocks_override": 32}

    async def talk() -> list[list[int]]:
        engine = AsyncLLMEngine(engine_config(**settings))

        async def answer(request_id: str) -> list[int]:
            outputs = [output async for output in engine.generate("The red", GREEDY, request_id)]
            return list(outputs[-1].outputs[0].token_ids)

        assert await engine.reset_prefix_cache() is True
        first = await answer("a")
        running = asyncio.ensure_future(answer("b"))
        await asyncio.sleep(0)
        await asyncio.gather(engine.sleep(), engine.sleep(level=2))
        assert await engine.is_sleeping()
        with pytest.raises(SleepingError):
            await answer("c")
        await engine.wake_up()
        assert not await engine.is_sleeping()
        answers = [first, await running, await answer("d")]
        await engine.close()
        with pytest.raises(EngineClosedError):
            await engine.sleep()
        return answers

    first, second, third = asyncio.run(talk())
    assert first == second == third


SCRIPT = """
import os, sys
import psutil, torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from quire import LLM, SamplingParams
from quire.models.llama import LlamaForCausalLM
config = LlamaConfig(vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=4,
                     num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=4096,
                     architectures=["LlamaForCausalLM"])
config.save_pretrained(sys.argv[1])
with torch.device("meta"):
    shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
torch.manual_seed(0)
weights = {name: 0.02 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
save_file(weights, os.path.join(sys.argv[1], "model.safetensors"))
del weights
llm = LLM(sys.argv[1], skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, debug=True)  # debug fills the blocks
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
def tokens():
    return llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
def resident():
    return psutil.Process().memory_info().rss
tokens()
before, awake = tokens(), resident()
for _ in range(3):
    llm.sleep()
    asleep = resident()
    llm.wake_up()
    assert tokens() == before
weights = sum(os.path.getsize(os.path.join(sys.argv[1], f)) for f in os.listdir(sys.argv[1]) if "safetensors" in f)
print(awake - asleep, weights + (64 << 20), resident() - awake)
"""


def test_memory_goes_and_comes_back(tmp_path):
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    freed, held, grown = map(int, result.stdout.split())
    assert held > 140 << 20
    assert freed > 0.8 * held
    assert grown < 0.2 * held
