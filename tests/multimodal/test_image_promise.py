"""Promise 1 with images: tokens and logprobs are bitwise those of a request that is alone in a fresh engine."""

from __future__ import annotations

import random

import pytest
import torch

from quire import BeamSearchParams, SamplingParams
from tests.multimodal.open_engine import Kind, ask, nothing_left, open_llm, room_for
from tests.multimodal.tiny_vision import IMAGE, picture

TOKENS = 6
SIZES = [(30, 100), (100, 30), (24, 24), (9, 17), (48, 48)]
# The numbers of each request's images: none, some, the same one again (also with another between), some next to others.
REQUESTS = [[], [0], [0], [1, 2], [0, 3, 0], [], [4, 0], [2], [1, 1, 3]]


def requests() -> list[tuple[dict, SamplingParams]]:
    rng = random.Random(2)
    images = [picture(number, size) for number, size in enumerate(SIZES)]
    shared = [rng.randrange(3, 300) for _ in range(9)]
    made = []
    for number, chosen in enumerate(REQUESTS):
        ids = list(shared[: rng.choice([2, 9])])
        for _ in chosen:
            ids += [IMAGE, *(rng.randrange(3, 300) for _ in range(rng.choice([0, 4])))]
        ids += [rng.randrange(3, 300) for _ in range(rng.choice([1, 6]))]
        data = {"multi_modal_data": {"image": [images[place] for place in chosen]}} if chosen else {}
        kinds = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "n": 2}]
        more = {"prompt_logprobs": 1} if number in (0, 3, 4) else {}
        params = SamplingParams(
            max_tokens=TOKENS, ignore_eos=True, logprobs=3, seed=number, **kinds[number % 3], **more
        )
        made.append(({"prompt_token_ids": ids, **data}, params))
    return made


def answers(llm, chosen: list[tuple[dict, SamplingParams]], ask=ask) -> list[tuple]:
    outputs = ask(llm, [prompt for prompt, _ in chosen], [params for _, params in chosen])
    nothing_left(llm)
    assert all(len(completion.token_ids) == TOKENS for output in outputs for completion in output.outputs)
    return [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(path, dtype) -> list[tuple]:
    return [answers(open_llm(path, dtype=dtype, enable_prefix_caching=False), [one])[0] for one in requests()]


def one_image(kind: Kind, dtype: str) -> int:
    return room_for(kind.most_tokens, 4 if dtype == "float32" else 2)


@pytest.mark.parametrize(("budget", "small", "cached"), [(5, True, True), (11, False, False), (2048, False, True)])
def test_a_crowd(path, kind, dtype, alone, budget, small, cached):
    more = {"media_cache_bytes": one_image(kind, dtype)} if small else {"enforce_eager": not cached}
    llm = open_llm(path, dtype=dtype, max_num_batched_tokens=budget, enable_prefix_caching=cached, **more)
    features = llm.llm_engine.scheduler.encoder.features
    assert answers(llm, requests()) == alone
    assert (len(features) < 3) if small else (features.misses == len(SIZES) == len(features))
    assert features.hits > 0
    # Once more, now that the engine knows blocks and features, and in another order.
    assert answers(llm, requests()[::-1]) == alone[::-1]
    assert small or features.misses == len(SIZES), "something was encoded again"


def test_preemption(path, kind, dtype, alone):
    llm = open_llm(
        path, dtype=dtype, max_num_batched_tokens=23, block_size=4, media_cache_bytes=one_image(kind, dtype),
        num_gpu_blocks_override=7 + kind.most_tokens * 2 // 3,
    )  # fmt: skip
    for _ in range(20):  # images that come late may find the pool free
        assert answers(llm, requests() * 3) == alone * 3
        if llm.llm_engine.scheduler.num_preemptions:
            break
    assert llm.llm_engine.scheduler.num_preemptions > 0


def test_threads_do_not_matter(path, kind, alone, dtype):
    torch.set_num_threads(3)
    try:
        assert answers(open_llm(path, dtype=dtype), requests()) == alone
    finally:
        torch.set_num_threads(1)


def test_beams_over_images(path, kind):
    prompts = [prompt for prompt, _ in requests()[:5]]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    fresh = [open_llm(path, enable_prefix_caching=False).beam_search(one, params)[0] for one in prompts]
    llm = open_llm(
        path, max_num_batched_tokens=23, block_size=4, media_cache_bytes=one_image(kind, "float32"),
        num_gpu_blocks_override=10 + kind.most_tokens * 3 // 4,
    )  # fmt: skip
    crowd = llm.beam_search(prompts, params)
    assert [output.sequences for output in crowd] == [output.sequences for output in fresh]
    assert all(len(output.sequences) == 3 for output in fresh)
    nothing_left(llm)
