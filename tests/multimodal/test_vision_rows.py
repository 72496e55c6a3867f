"""Every architecture that sees, and each of its variants: promise 1, and plans that come true.

As in test_image_promise.py, whose kinds go through all cases there; here is one crowd and one small pool for each.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire.platform.kv.windows import Footprint
from tests.multimodal.open_engine import KINDS, all_ready, ask, drive, nothing_left, open_llm, room_for
from tests.multimodal.test_image_promise import SIZES, answers, requests
from tests.multimodal.test_image_promise import TOKENS as STEPS
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, build, picture

OTHERS = FAMILIES.keys() - {kind.architecture for kind in KINDS}
CASES = [
    pytest.param(
        architecture,
        variant,
        dtype,
        marks=() if variant == next(iter(FAMILIES[architecture].variants)) and dtype == "float32" else pytest.mark.slow,
    )
    for architecture in sorted(OTHERS)
    for variant in FAMILIES[architecture].variants
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("architecture", "variant", "dtype"), CASES)
def test_a_request_answers_as_if_it_were_alone(architecture: str, variant: str, dtype: str, tmp_path: Path) -> None:
    path = str(build(architecture, variant, tmp_path))
    whole = FAMILIES[architecture].whole
    chosen = [one for one in requests() if not whole or "multi_modal_data" in one[0]]
    calm = open_llm(path, dtype=dtype, enable_prefix_caching=False)
    alone = [answers(calm, [one])[0] for one in chosen]
    most, levels = _most_tokens(calm), calm.llm_engine.executor.runner.model.feature_levels
    longest = max(len(given["prompt_token_ids"]) + (most - 1) * _count(given) for given, _ in chosen)
    crowd = open_llm(path, dtype=dtype, max_num_batched_tokens=longest if whole else 11)
    assert answers(crowd, chosen) == alone
    assert answers(crowd, chosen[::-1]) == alone[::-1]
    one_image = {"media_cache_bytes": room_for(most * (1 + levels), 4 if dtype == "float32" else 2)}
    tight = open_llm(
        path, dtype=dtype, block_size=4, max_num_batched_tokens=8 * longest if whole else 23,
        num_gpu_blocks_override=_least(calm, longest) if whole else 7 + most * 2 // 3, **({} if whole else one_image),
    )  # fmt: skip
    for _ in range(20):  # images that come late may find the pool free
        assert answers(tight, chosen * 3) == alone * 3
        if tight.llm_engine.scheduler.num_preemptions:
            break
    if variant == "large_tiles":  # whose prompts fill the pool one after the other
        tight = _crowded(calm, path, dtype, alone)
    assert tight.llm_engine.scheduler.num_preemptions > 0
    # The pictures are seen: another one gives other scores.
    other: dict[str, Any] = {**requests()[1][0], "multi_modal_data": {"image": [picture(9, SIZES[0])]}}
    given, params = requests()[1]
    first, second = (ask(calm, [one], [params])[0].outputs[0] for one in (given, other))
    assert first.logprobs != second.logprobs and len(first.token_ids) == STEPS
    nothing_left(calm)


def _count(given: dict[str, Any]) -> int:
    """A prompt's images."""
    return len(given.get("multi_modal_data", {}).get("image", ()))


def _least(llm: Any, longest: int) -> int:
    """Blocks, of each group of layers, of the smallest pool that takes a prompt of so many tokens in one step, and two
    answers."""
    windows = llm.llm_engine.executor.facts.windows

    def takes(blocks: int) -> bool:
        pool = Footprint(blocks * len(windows), 4, windows)
        return pool.most_at_once >= longest and 2 * pool.blocks(longest + STEPS) <= pool.num_blocks

    return next(blocks for blocks in count(1) if takes(blocks))


def _crowded(calm: Any, path: str, dtype: str, alone: list[tuple]) -> Any:
    """An engine that has answered one prompt twice at once, in a pool that holds both and not both of the answers."""
    place, (prompt, params) = next((i, one) for i, one in enumerate(requests()) if one[1].n == 1)
    blocks = -(-len(ask(calm, [prompt], [params])[0].prompt_token_ids) // 4)
    tight = open_llm(
        path, dtype=dtype, block_size=4, enable_prefix_caching=False, num_gpu_blocks_override=2 * blocks + 1
    )
    for name in "ab":
        tight.llm_engine.add_request(name, prompt, params)
    all_ready(tight.llm_engine)
    done = drive(tight.llm_engine)
    for name in "ab":
        output = done[name]
        assert ([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) == alone[place]
    return tight


def _most_tokens(llm: Any) -> int:
    """Placeholders of the picture that takes the most."""
    processor, model = llm.llm_engine.media.preprocessor.processor, llm.llm_engine.executor.runner.model
    planned = [model.planned_layout(size[::-1], processor.plan(*size[::-1], {}).final) for size in SIZES]
    outputs = [
        ask(llm, [{"prompt_token_ids": [5, IMAGE], "multi_modal_data": {"image": picture(number, size)}}])[0]
        for number, size in enumerate(SIZES)
    ]
    lengths = [len(output.prompt_token_ids) - 1 for output in outputs]
    assert lengths == [layout.tokens for layout in planned]
    return max(lengths)
