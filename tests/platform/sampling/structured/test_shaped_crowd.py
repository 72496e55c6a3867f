"""Promise 1 with shapes beside adapters and images: on the bundled model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import adapter_path
from quire.platform.sampling.structured.params import StructuredOutputsParams as Shape
from tests.platform.sampling.structured.shapes import PERSON, compact

ADAPTERS = [None, "french", "shout"]
SHAPES = [compact(json=PERSON), None, Shape(regex="(la ){2,9}!"), Shape(choice=["circle", "square", "triangle"])]
REQUESTS = 18


def request(llm: LLM, index: int) -> tuple[Any, SamplingParams, LoRARequest | None]:
    params = SamplingParams(
        max_tokens=40, temperature=1.2, seed=index, logprobs=1, n=1 + index % 2, structured_outputs=SHAPES[index % 4]
    )
    name = ADAPTERS[index % 3]
    prompt: Any = f"Tell {index}"
    if index % 5 == 0:
        pixels = np.random.default_rng(index).integers(0, 255, (40, 40, 3), np.uint8)
        marker = llm.llm_engine.input_processor.image_spec.marker
        prompt = {"prompt": f"{marker} Which?", "multi_modal_data": {"image": Image.fromarray(pixels)}}
    return prompt, params, None if name is None else LoRARequest(name, lora_path=str(adapter_path(name)))


def answers(llm: LLM, chosen: list[int]) -> list[Any]:
    prompts, params, adapters = zip(*(request(llm, index) for index in chosen), strict=True)
    outputs = llm.generate(list(prompts), list(params), lora_request=list(adapters), use_tqdm=False)
    return [[(one.token_ids, one.text, one.logprobs, one.finish_reason) for one in out.outputs] for out in outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(enable_lora=True, enable_prefix_caching=False, max_num_batched_tokens=256)


def test_alone_and_among_adapters_and_images(llm: LLM) -> None:
    alone = [answers(llm, [index])[0] for index in range(REQUESTS)]
    assert answers(llm, list(range(REQUESTS))) == alone
    for index, given in enumerate(alone):
        for _, text, _, reason in given:
            if index % 4 == 3:
                assert text in ("circle", "square", "triangle")
            elif index % 4 == 0 and reason == "stop":
                assert set(json.loads(text)) == {"name", "kind", "sides"}
    assert any(
        index % 5 == 0 and index % 4 == 0 and one[3] == "stop" for index in range(REQUESTS) for one in alone[index]
    )


def test_placeholders_of_images_are_not_generated(llm: LLM) -> None:
    """Though a grammar names them: the token has a text, and is no text."""
    spec = llm.llm_engine.input_processor.image_spec
    assert spec is not None
    params = SamplingParams(max_tokens=5, structured_outputs=Shape(grammar=f'start: "a" {spec.marker}'))
    (output,) = llm.generate("Tell", params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "error")
    assert output.failure is not None and output.failure.by_caller
