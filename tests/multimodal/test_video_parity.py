"""Videos of every family against transformers: features, placeholders and greedy tokens; and promise 1 for the same.

Requests with videos, images, both and neither run together, in steps that cut videos and stand between them, in a pool
so small that some are preempted. Transformers runs each alone, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.loader import load_model
from tests.multimodal.clips import clip
from tests.multimodal.open_engine import all_ready, ask, drive, greedy, nothing_left, open_llm
from tests.multimodal.tiny_vision import IMAGE, picture
from tests.multimodal.video_models import CASES, VIDEO_FAMILIES, Request, VideoOracle

STEPS = 32


def requests(architecture: str) -> list[Request]:
    """Of one prompt's videos, LLaVA's in transformers have the same number of frames."""
    video = VIDEO_FAMILIES[architecture].marker
    return [
        Request([5, video, 7, 8], [clip(1, 2)]),
        Request([5, video, 7, video, 8, 9], [clip(2, 3, 24, 24), (clip(3, 3, 30, 70), 4.0)]),
        Request([5, IMAGE, 7, video, 8, IMAGE, 9], [clip(4, 5)], [picture(1, (40, 30)), picture(2, (24, 60))]),
        Request([5, video, 7, 8, 11, 12], [clip(1, 2)]),
        Request([IMAGE, 5, 6], [], [picture(1, (40, 30))]),
        Request([video, IMAGE, 6], [(clip(5, 8, 24, 60), 12.5)], [picture(1, (40, 30))]),
        Request([5, 6, 7]),
    ]


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_features(architecture: str, variant: str, tmp_path: Path) -> None:
    oracle = VideoOracle(architecture, variant, tmp_path)
    model = load_model(tmp_path)
    for video in (clip(1, 2), clip(2, 5, 24, 24), clip(3, 8, 30, 70)):
        inputs = oracle.inputs(video)
        with torch.inference_mode():
            ours = model.encode_video(inputs)
        theirs = oracle.features(inputs)
        assert ours.shape == theirs.shape and ours.shape[1] == 32 * (1 + model.feature_levels)
        assert (ours - theirs).abs().max() < 1e-4 and theirs.std() > 0.1


def blocks_for(lengths: list[int], size: int = 4) -> int:
    """Of a pool that holds the longest of these prompts with its answer, and a quarter of another one."""
    return max(-(-(length + STEPS) // size) for length in lengths) * 5 // 4


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_answers(architecture: str, variant: str, tmp_path: Path) -> None:
    oracle, asked = VideoOracle(architecture, variant, tmp_path), requests(architecture)
    quiet = open_llm(oracle.path, enable_prefix_caching=False, num_gpu_blocks_override=800)
    params = greedy(STEPS, logprobs=1)
    alone = [ask(quiet, [one.prompt], params)[0] for one in asked]
    blocks = blocks_for([len(output.prompt_token_ids) for output in alone])
    llm = open_llm(oracle.path, max_num_batched_tokens=13, block_size=4, num_gpu_blocks_override=blocks)
    engine = llm.llm_engine
    for number, one in enumerate(asked):
        engine.add_request(str(number), one.prompt, params)
    all_ready(engine)  # or those that come late would need no room beside the others
    finished: dict[str, Any] = drive(engine)
    assert engine.scheduler.num_preemptions > 0
    for number, one in enumerate(asked):
        expanded, expected = oracle.answer(one, STEPS)
        for output in (alone[number], finished[str(number)]):
            assert list(output.prompt_token_ids) == expanded
            assert list(output.outputs[0].token_ids) == expected
        assert alone[number].outputs[0].logprobs == finished[str(number)].outputs[0].logprobs
    nothing_left(llm)
