"""A LLaVA whose config has a token for videos: a video is its frames, each as an image would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from quire.errors import CheckpointError, RequestError, UnsupportedModelError
from quire.models.loader import load_model
from tests.multimodal import clips
from tests.multimodal.open_engine import all_ready, ask, drive, greedy, nothing_left, open_llm
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, SIDE, VOCAB, Oracle, build, make, picture

LLAVA, PIXTRAL = "LlavaForConditionalGeneration", "LlavaOfPixtral"
VIDEO = VOCAB - 2
CLIP_SIZE = {"height": SIDE, "width": SIDE}
CASES = [pytest.param(name, marks=() if name == "clip" else pytest.mark.slow) for name in
         ("clip", "clip_layers", "siglip", "siglip_default", "qwen2_tied", "gpt2")]  # fmt: skip


def taught(folder: Path, variant: str = "clip", token: Any = VIDEO, model: Any = None) -> str:
    """A variant that takes videos, prepared as its images are."""
    path = build(LLAVA, variant, folder, model)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "video_token_index": token}))
    images = json.loads((path / "preprocessor_config.json").read_text())
    own = {name: images[name] for name in ("image_mean", "image_std", "resample") if name in images}
    settings = {"video_processor_type": "LlavaVideoProcessor", "size": CLIP_SIZE, "fps": 1, "max_frames": 3, **own}
    (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return str(path)


def frames(seed: int, count: int) -> list[Image.Image]:
    """Of the tower's size, so that it does not matter how they would be cut."""
    return [Image.fromarray(frame) for frame in clips.clip(seed, count, SIDE, SIDE)]


@pytest.mark.parametrize("variant", CASES)
def test_tokens_are_transformers_of_the_frames_as_images(variant: str, tmp_path: Path) -> None:
    """In steps that cut videos, with too small a pool; and bitwise those of one alone."""
    oracle = Oracle(LLAVA, variant)
    path = taught(tmp_path, variant, model=oracle.model)
    prompts: list[tuple[list[int], list[Any], list[Any]]] = [
        ([5, VIDEO, 7, 8], [frames(1, 2)], []),
        ([5, VIDEO, 7, VIDEO, 8, 9], [frames(2, 3), frames(3, 1)], []),
        ([5, IMAGE, 7, VIDEO, 8, IMAGE, 9], [frames(4, 5)], [picture(1, (24, 24)), picture(2, (24, 24))]),
        ([IMAGE, 5, 6], [], [picture(1, (24, 24))]),
        ([5, 6, 7], [], []),
    ]
    given = [
        {"prompt_token_ids": ids, "multi_modal_data": {k: v for k, v in (("video", video), ("image", image)) if v}}
        for ids, video, image in prompts
    ]
    llm = open_llm(path, max_num_batched_tokens=13, block_size=4, num_gpu_blocks_override=52)
    quiet = open_llm(path, enable_prefix_caching=False, num_gpu_blocks_override=300)
    engine, params = llm.llm_engine, greedy(32, logprobs=1)
    for number, one in enumerate(given):
        engine.add_request(str(number), one, params)
    all_ready(engine)
    finished = drive(engine)
    assert engine.scheduler.num_preemptions > 0
    for number, (ids, videos, images) in enumerate(prompts):
        output, kinds = finished[str(number)], {VIDEO: iter(videos), IMAGE: iter([[one] for one in images])}
        spread, pictures = [], []  # with an image's marker for each frame, and all images and frames
        for token in ids:
            some = next(kinds[token]) if token in kinds else []
            spread += [IMAGE] * len(some) if some else [token]
            pictures += some
        expanded, expected = oracle.answer(spread, pictures, 32)
        assert [IMAGE if token == VIDEO else token for token in output.prompt_token_ids] == expanded
        assert list(output.outputs[0].token_ids) == expected
        (alone,) = ask(quiet, [given[number]], params)
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    nothing_left(llm)


@pytest.mark.parametrize("variant", CASES)
def test_features_are_those_of_images(variant: str, tmp_path: Path) -> None:
    theirs = make(LLAVA, variant)
    model = load_model(Path(taught(tmp_path, variant, model=theirs)))
    for count in (1, 2, 5):
        pixels = torch.randn(1, count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(count))
        with torch.inference_mode():
            ours = model.encode_video({"pixel_values_videos": pixels})
            expected = torch.cat(tuple(theirs.get_image_features(pixels[0]).pooler_output))
        assert ours.shape == expected.shape
        assert model.video_layout({"pixel_values_videos": pixels}).features == len(expected)
        assert (ours - expected).abs().max() < 1e-4 and expected.std() > 0.1
    with pytest.raises(ValueError, match=r"\[1, 2, 3, 12, 24\] of it, and the tower takes frames of \[3, 24, 24\]"):
        model.video_layout({"pixel_values_videos": torch.zeros(1, 2, 3, 12, 24)})


def test_without_that_token_videos_are_refused(tmp_path: Path) -> None:
    llm = open_llm(str(build(LLAVA, "clip", tmp_path)))
    with pytest.raises(RequestError, match="video"):
        ask(llm, [{"prompt_token_ids": [5, 6], "multi_modal_data": {"video": [frames(1, 2)]}}])


@pytest.mark.parametrize("token", [-1, 2**31, "<video>", True, 1.0])
def test_what_is_no_token_is_refused(token: Any, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"video_token_index=.*: it must be a token id"):
        load_model(Path(taught(tmp_path, token=token)))


def test_a_tower_of_many_sizes_takes_no_frames(tmp_path: Path) -> None:
    path = build(PIXTRAL, next(iter(FAMILIES[PIXTRAL].variants)), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "video_token_index": VIDEO}))
    with pytest.raises(UnsupportedModelError, match="of a model whose frames are all of one size"):
        load_model(path)
