"""Engines whose weights are quantized at load: promise 1, sleep, a worker of its own, images and adapters."""

from __future__ import annotations

import pytest
from PIL import Image

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import adapter_path, picture_path
from quire.models.quantization import ON_THE_FLY
from tests.platform.engine.test_promise import REQUESTS, answers

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3)


@pytest.mark.parametrize("name", ON_THE_FLY)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_crowd_chunks_and_preemption_change_nothing(tiny_path, name, dtype):
    settings = {"quantization": name, "dtype": dtype, "debug": True}
    chosen = list(range(0, REQUESTS, 3))
    alone = LLM(str(tiny_path), enable_prefix_caching=False, **settings)
    want = {i: answers(alone, [i])[i] for i in chosen}
    assert answers(LLM(str(tiny_path), max_num_batched_tokens=13, **settings), chosen) == want
    crowded = LLM(str(tiny_path), num_gpu_blocks_override=30, **settings)
    assert answers(crowded, chosen) == want
    assert crowded.llm_engine.scheduler.num_preemptions > 0
    assert answers(LLM(str(tiny_path), executor="process", **settings), chosen) == want


def test_names_of_the_configuration_are_overridden_beside(tiny_path):
    plain, other = (
        LLM(str(tiny_path), quantization="int8", hf_overrides=fields) for fields in ({}, {"rope_theta": 100.0})
    )
    assert answers(plain, [1]) != answers(other, [1])
    model = other.llm_engine.executor.runner.model
    assert model.config.rope_parameters["rope_theta"] == 100.0 and model.quantization.layers


def seen(llm: LLM) -> list[tuple]:
    picture = {"type": "image_pil", "image_pil": Image.open(picture_path())}
    asked = [{"role": "user", "content": [picture, {"type": "text", "text": "What do you see?"}]}]
    told = [{"role": "user", "content": "There is a red star. What color is the star?"}]
    outputs = llm.chat([asked, told, told], GREEDY, use_tqdm=False, lora_request=[None, LoRARequest("french"), None])
    return [(out.outputs[0].text, out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


@pytest.mark.parametrize("name", ON_THE_FLY)
def test_the_bundled_model_sees_speaks_french_and_sleeps(one_thread, name):
    llm = LLM(enable_lora=True, num_gpu_blocks_override=256, quantization=name, debug=True)
    llm.load_lora_adapter("french", adapter_path("french"))
    before = seen(llm)
    llm.sleep()
    llm.wake_up()
    assert seen(llm) == before
    plain = LLM(enable_lora=True, num_gpu_blocks_override=256)
    plain.load_lora_adapter("french", adapter_path("french"))
    if name == "int8":
        assert [text for text, _, _ in before] == [text for text, _, _ in seen(plain)]
