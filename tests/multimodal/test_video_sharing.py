"""One request's frames never reach another's: videos that differ in little, asked together, answer as each alone.

Answers are compared to the bit, with their logprobs: in crowds, in small steps, with little memory, and found again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import SamplingParams
from tests.multimodal.clips import clip
from tests.multimodal.open_engine import all_ready, ask, drive, greedy, nothing_left, open_llm, until
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, picture
from tests.multimodal.video_models import EACH, VIDEO_FAMILIES, Request, first_variant, made

STEPS = 6
BLOCK = 4
BEFORE = list(range(5, 14))  # two full blocks, and one token beside the video
WHOLE = clip(1, 6, 24, 32)
CASES = [pytest.param(*case, "float32") for case in EACH] + [
    pytest.param(architecture, variant, dtype, marks=pytest.mark.slow)
    for architecture in VIDEO_FAMILIES
    for variant in FAMILIES[architecture].variants
    for dtype in ("float32", "bfloat16")
    if (variant, dtype) != (first_variant(architecture), "float32")
]


def alike() -> list[np.ndarray]:
    """Videos of one size and length, each of which differs from the first in little."""
    other, pixel = WHOLE.copy(), WHOLE.copy()
    other[3] = clip(2, 1, 24, 32)[0]
    pixel[5, :8, :8] = 255 - pixel[5, :8, :8]
    return [WHOLE, other, pixel, WHOLE[::-1], WHOLE[[0, 1, 2, 3, 5, 4]], WHOLE[:, ::-1]]


def requests(video: int) -> list[Request]:
    """Some videos come again, some are cut in two, and some of their frames are images of others."""
    a, b, *_ = alike()
    made = [Request([*BEFORE, video, 7, 8], [one]) for one in alike()]
    made += [
        Request([*BEFORE, video, video, 7, 8], [a[:2], a[2:4]]),
        Request([*BEFORE, video, 5, video, 7], [b, a]),
        Request([*BEFORE, IMAGE, video, 7, IMAGE], [a], [picture(1, (24, 32)), picture(2, (24, 32))]),
        Request([*BEFORE, IMAGE, video, 7, IMAGE], [b], [picture(2, (24, 32)), picture(1, (24, 32))]),
        Request([*BEFORE, 7, 8]),
    ]
    return made


def params(count: int) -> list[SamplingParams]:
    """Greedy where the videos are alike; in all ways behind them."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "n": 2}]
    chosen = [kinds[0]] * len(alike()) + [kinds[(number + 1) % 3] for number in range(count - len(alike()))]
    return [
        SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=3, seed=number // 3, **kind)
        for number, kind in enumerate(chosen)
    ]


def answers(outputs: list[Any]) -> list[Any]:
    assert all(len(completion.token_ids) == STEPS for output in outputs for completion in output.outputs), outputs
    return [[(completion.token_ids, completion.logprobs) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(("architecture", "variant", "dtype"), CASES)
def test_a_request_answers_as_if_it_were_alone(architecture: str, variant: str, dtype: str, tmp_path: Path) -> None:
    path = made(architecture, variant, tmp_path)
    prompts = [one.prompt for one in requests(VIDEO_FAMILIES[architecture].marker)]
    chosen = params(len(prompts))
    quiet = open_llm(path, dtype=dtype, enable_prefix_caching=False, num_gpu_blocks_override=900)
    outputs = [ask(quiet, [one], own)[0] for one, own in zip(prompts, chosen, strict=True)]
    nothing_left(quiet)
    alone, lengths = answers(outputs), [len(output.prompt_token_ids) for output in outputs]
    seen = [one[0][1] for one in alone[: len(alike())]]
    assert all(one != other for number, one in enumerate(seen) for other in seen[:number]), "a frame is not seen"
    levels = quiet.llm_engine.executor.runner.model.feature_levels
    crowd = open_llm(
        path, dtype=dtype, max_num_batched_tokens=11, block_size=BLOCK, num_gpu_blocks_override=900,
        features=max(lengths) * (1 + levels),
    )  # fmt: skip
    assert answers(ask(crowd, prompts, chosen)) == alone
    assert answers(ask(crowd, prompts[::-1], chosen[::-1])) == alone[::-1]  # now that blocks are known
    nothing_left(crowd)
    # Room for two of these prompts, which are of one length, and not for both of their answers; for less, where layers
    # with a window give blocks back.
    own = prompts[: len(alike())]
    most = 2 * -(-lengths[0] // BLOCK) + 1
    assert any(
        _answers_in_little_room(path, dtype, own, chosen, alone, room) for room in range(most, most // 2 + 1, -BLOCK)
    )


def _answers_in_little_room(
    path: str, dtype: str, prompts: list[Any], chosen: list[SamplingParams], alone: list[Any], blocks: int
) -> bool:
    """Whether somebody was preempted; the answers are those of before all the same."""
    tight = open_llm(path, dtype=dtype, block_size=BLOCK, enable_prefix_caching=False, num_gpu_blocks_override=blocks)
    for number, (one, param) in enumerate(zip(prompts, chosen, strict=False)):
        tight.llm_engine.add_request(str(number), one, param)
    all_ready(tight.llm_engine)  # or those that come late would need no room beside the others
    finished = drive(tight.llm_engine)
    assert answers([finished[str(number)] for number in range(len(prompts))]) == alone[: len(prompts)]
    nothing_left(tight)
    return tight.llm_engine.scheduler.num_preemptions > 0


def count_encodes(llm: Any) -> list[Any]:
    """A list that takes the inputs of each video that the model encodes from here on."""
    model = llm.llm_engine.executor.runner.model
    encode, calls = model.encode_video, []

    def counted(inputs: Any) -> Any:
        calls.append(inputs)
        return encode(inputs)

    model.encode_video = counted
    return calls


@pytest.mark.parametrize(("architecture", "variant"), EACH)
def test_videos_that_differ_in_a_frame_share_what_is_before_them(
    architecture: str, variant: str, tmp_path: Path
) -> None:
    llm = open_llm(made(architecture, variant, tmp_path), block_size=BLOCK, num_gpu_blocks_override=900)
    video = VIDEO_FAMILIES[architecture].marker
    asked = [Request([*BEFORE, video, 7, 8], [one]).prompt for one in alike()]
    calls = count_encodes(llm)
    first, *others = [ask(llm, [one])[0] for one in asked]
    length = len(first.prompt_token_ids)
    # Beside what is before the video, its own text is equal where features come later.
    features = [place for place, token in enumerate(first.prompt_token_ids) if _is_placeholder(architecture, token)]
    assert first.num_cached_tokens == 0
    for output in others:
        assert 2 * BLOCK <= output.num_cached_tokens <= features[0]
    assert len(calls) == len(asked)
    for one in asked:
        (again,) = ask(llm, [one])
        assert again.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert len(calls) == len(asked), "a video was encoded again"
    nothing_left(llm)


def _is_placeholder(architecture: str, token: int) -> bool:
    return token == VIDEO_FAMILIES[architecture].placeholder


@pytest.mark.parametrize(("architecture", "variant"), EACH)
def test_running_requests_with_other_frames_own_other_blocks(architecture: str, variant: str, tmp_path: Path) -> None:
    llm = open_llm(made(architecture, variant, tmp_path), block_size=BLOCK, num_gpu_blocks_override=900)
    engine, video = llm.llm_engine, VIDEO_FAMILIES[architecture].marker
    for name, one in zip("ab", alike(), strict=False):
        engine.add_request(name, Request([*BEFORE, video, 7, 8], [one]).prompt, greedy(30))
        all_ready(engine)
        until(engine, lambda name=name: engine.core.requests[name].sequences[0].output_ids)
    tables = [engine.scheduler.kv.blocks(engine.core.requests[name].sequences[0].id) for name in "ab"]
    ids = engine.core.requests["a"].sequences[0].token_ids
    first = next(place for place, token in enumerate(ids) if _is_placeholder(architecture, token)) // BLOCK
    assert tables[0][:2] == tables[1][:2] and not set(tables[0][first:]) & set(tables[1])
    assert len(drive(engine)) == 2
    nothing_left(llm)
