"""Videos of LLaVA-OneVision and LLaVA-NeXT-Video: features, their number and greedy tokens are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaNextVideoProcessor, LlavaOnevisionProcessor

from quire.config import MediaConfig
from quire.models.loader import load_model
from quire.multimodal.video_processor import VideoProcessor
from tests.multimodal import clips
from tests.multimodal.open_engine import all_ready, ask, drive, greedy, nothing_left, open_llm
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, SIDE, VOCAB, Oracle, build, make, picture

ONEVISION, NEXT_VIDEO = "LlavaOnevisionForConditionalGeneration", "LlavaNextVideoForConditionalGeneration"
VIDEO = VOCAB - 2
CASES = [
    pytest.param(architecture, variant, marks=() if variant in FAMILIES[architecture].quick else pytest.mark.slow)
    for architecture in (ONEVISION, NEXT_VIDEO)
    for variant in FAMILIES[architecture].variants
]


def clip(frames: int) -> dict[str, torch.Tensor]:
    """What a video processor makes of a video."""
    generator = torch.Generator().manual_seed(frames)
    return {"pixel_values_videos": torch.randn(1, frames, 3, SIDE, SIDE, generator=generator)}


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_features(architecture: str, variant: str, tmp_path: Path) -> None:
    theirs = make(architecture, variant)
    model = load_model(build(architecture, variant, tmp_path, theirs))
    for frames in (1, 2, 5):
        inputs = clip(frames)
        with torch.inference_mode():
            ours, expected = model.encode_video(inputs), theirs.get_video_features(**inputs).pooler_output[0]
        assert ours.shape == expected.shape == (model.video_layout(inputs).features, 32)
        assert (ours - expected).abs().max() < 1e-4 and expected.std() > 0.1
    with pytest.raises(ValueError, match=r"\[1, 2, 3, 12, 24\] of it, and the tower takes frames of \[3, 24, 24\]"):
        model.video_layout({"pixel_values_videos": torch.zeros(1, 2, 3, 12, 24)})


def test_a_prompt_has_as_many_placeholders_as_transformers_processor_writes(tmp_path: Path) -> None:
    """Four patches a frame's side, as LLaVA-NeXT-Video's 24: its processor counts by four."""
    for frames in (1, 7):
        one = SimpleNamespace(num_image_tokens=9, video_token="v")
        pixels = {"pixel_values_videos": np.zeros((1, frames, 3, SIDE, SIDE))}
        theirs = LlavaOnevisionProcessor.replace_video_token(one, pixels, 0)  # type: ignore[arg-type]
        model = load_model(build(ONEVISION, "scaled", tmp_path / f"one{frames}"))
        assert model.video_layout(clip(frames)).tokens == len(theirs)
        next_video = SimpleNamespace(patch_size=6, video_token="v")
        theirs = LlavaNextVideoProcessor.replace_video_token(next_video, pixels, 0)  # type: ignore[arg-type]
        model = load_model(build(NEXT_VIDEO, "even", tmp_path / f"next{frames}"))
        assert model.video_layout(clip(frames)).tokens == len(theirs) == 4 * frames


SETTINGS: dict[str, dict[str, Any]] = {
    ONEVISION: {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": SIDE, "width": SIDE}},
    NEXT_VIDEO: {
        "video_processor_type": "LlavaNextVideoVideoProcessor", "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    },
}  # fmt: skip
WHOLE = [
    pytest.param(ONEVISION, "scaled"),
    pytest.param(ONEVISION, "published", marks=pytest.mark.slow),
    pytest.param(NEXT_VIDEO, "even"),
    pytest.param(NEXT_VIDEO, "conv", marks=pytest.mark.slow),
]


def made(architecture: str, variant: str, folder: Path, model: Any = None) -> str:
    path = build(architecture, variant, folder, model)
    (path / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS[architecture]))
    return str(path)


def asked(ids: list[int], videos: list[Any], images: list[Any]) -> dict[str, Any]:
    data = {kind: given for kind, given in (("video", videos), ("image", images)) if given}
    return {"prompt_token_ids": ids, "multi_modal_data": data}


def prompts() -> list[tuple[list[int], list[Any], list[Any]]]:
    """(ids with markers, videos, images); of one prompt's videos, transformers wants the same number of frames."""
    return [
        ([5, VIDEO, 7, 8], [clips.clip(1, 2)], []),
        ([5, VIDEO, 7, VIDEO, 8, 9], [clips.clip(2, 3, 24, 24), clips.clip(3, 3, 30, 70)], []),
        ([5, IMAGE, 7, VIDEO, 8, IMAGE, 9], [clips.clip(4, 5)], [picture(1, (40, 30)), picture(2, (24, 60))]),
        ([IMAGE, 5, 6], [], [picture(1, (40, 30))]),
        ([5, 6, 7], [], []),
    ]


@torch.inference_mode()
def answer(oracle: Oracle, path: str, ids: list[int], videos: list[Any], images: list[Any]) -> tuple[list[int], ...]:
    """(expanded prompt, greedy tokens) of transformers, in float64."""
    processor, model = VideoProcessor(Path(path), MediaConfig(), "none"), oracle.model
    more = {name: value.double() if value.is_floating_point() else value for name, value in
            (oracle.inputs(images) if images else {}).items()}  # fmt: skip
    pixels = []
    for video in videos:
        plan = processor.plan(*video.shape[:3], {})
        frames = [torch.from_numpy(frame).permute(2, 0, 1).contiguous() for frame in video]
        pixels.append(processor.finish([processor.resized(frame, plan, {}) for frame in frames], {}))
    if videos:
        more["pixel_values_videos"] = torch.cat([one["pixel_values_videos"] for one in pixels]).double()
    lengths = {IMAGE: iter([len(oracle.features(image)) for image in images]),
               VIDEO: iter([len(model.get_video_features(**one).pooler_output[0]) for one in pixels])}  # fmt: skip
    expanded = [token for one in ids for token in ([one] * next(lengths[one]) if one in lengths else [one])]
    wide = model.double()
    out = wide.generate(
        input_ids=torch.tensor([expanded]), attention_mask=torch.ones(1, len(expanded), dtype=torch.int64),
        max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0, **more,
    )  # fmt: skip
    model.float()
    return expanded, out[0, len(expanded) :].tolist()


@pytest.mark.parametrize(("architecture", "variant"), WHOLE)
def test_prompts_with_videos_and_images(architecture: str, variant: str, tmp_path: Path) -> None:
    """Tokens are transformers', in steps that cut videos, with too small a pool; and bitwise those of one alone."""
    oracle = Oracle(architecture, variant)
    path = made(architecture, variant, tmp_path, oracle.model)
    llm = open_llm(path, max_num_batched_tokens=13, block_size=4, num_gpu_blocks_override=60)
    quiet = open_llm(path, enable_prefix_caching=False, num_gpu_blocks_override=300)
    given = [asked(*one) for one in prompts()]
    engine, params = llm.llm_engine, greedy(32, logprobs=1)
    for number, one in enumerate(given):
        engine.add_request(str(number), one, params)
    all_ready(engine)
    finished = drive(engine)
    assert engine.scheduler.num_preemptions > 0
    for number, (ids, videos, images) in enumerate(prompts()):
        output = finished[str(number)]
        expanded, expected = answer(oracle, path, ids, videos, images)
        assert list(output.prompt_token_ids) == expanded
        assert list(output.outputs[0].token_ids) == expected
        (alone,) = ask(quiet, [given[number]], params)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    nothing_left(llm)
