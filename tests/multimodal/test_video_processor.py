"""Frames chosen and made into pixels as transformers' video processors do it, which compute with torchvision.

video_golden.json has what they gave (transformers 5.23, torchvision 0.28) for small settings and the clips of `clip`:
of pixels the mean, the deviation and every so-manieth number; of chosen frames all, or their number, sum and last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import MediaConfig
from quire.errors import CheckpointError, RequestError
from quire.multimodal.video_processor import FAMILIES, VideoProcessor
from quire.multimodal.video_sampling import Clip

GOLDEN = json.loads((Path(__file__).parent / "video_golden.json").read_text())


def clip(frames: int, height: int, width: int) -> np.ndarray:
    t, y, x, c = np.meshgrid(*(np.arange(n) for n in (frames, height, width, 3)), indexing="ij")
    return ((t * 31 + y * y * 3 + x * 7 * (c + 1) + ((x * y) % 11) * 13) % 256).astype(np.uint8)


def make(folder: Path, name: str, config: MediaConfig | None = None, **settings: Any) -> VideoProcessor:
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": name, **settings}))
    return VideoProcessor(folder, config or MediaConfig(), "none")


def processed(processor: VideoProcessor, video: np.ndarray, **settings: Any) -> dict[str, torch.Tensor]:
    plan = processor.plan(*video.shape[:3], settings)
    frames = [torch.from_numpy(frame).permute(2, 0, 1).contiguous() for frame in video]
    return processor.finish([processor.resized(frame, plan, settings) for frame in frames], settings)


def test_every_family_has_an_example():
    """But quire's own, which transformers does not have: ``test_llava_frames.py`` compares it with images."""
    assert {one["processor"] for one in GOLDEN} == set(FAMILIES) - {"LlavaVideoProcessor"}


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda one: one["processor"])
def test_pixels(golden, tmp_path):
    processor = make(tmp_path, golden["processor"], **golden["settings"])
    for expected in golden["pixels"]:
        found = processed(processor, clip(*expected["clip"]))
        pixels = found[expected["name"]]
        assert list(pixels.shape) == expected["shape"]
        if "grid" in expected:
            assert found["video_grid_thw"].tolist() == [expected["grid"]]
        flat = pixels.flatten().double()
        # One step of 255 is 0.02: a torch that rounds otherwise may differ by one here and there.
        assert abs(flat.mean() - expected["mean"]) < 1e-3 and abs(flat.std() - expected["std"]) < 1e-3
        some = flat[:: max(1, len(flat) // 9)] - torch.tensor(expected["some"], dtype=torch.float64)
        assert some.abs().max() < 0.02


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda one: one["processor"])
def test_chosen_frames(golden, tmp_path):
    processor = make(tmp_path, golden["processor"], **golden["settings"])
    for frames, rate, asked, expected in golden["chosen"]:
        file = Clip(frames, rate, frames / rate if rate else None)  # which says how long it is
        if expected is None:
            with pytest.raises(ValueError):
                processor.choose(file, {"do_sample_frames": True, **asked}, False)
            continue
        found = processor.choose(file, {"do_sample_frames": True, **asked}, False)
        if isinstance(expected, dict):
            assert {"count": len(found), "sum": sum(found), "last": found[-1]} == expected, (frames, rate, asked)
        else:
            assert found == expected, (frames, rate, asked)


def test_frames_with_a_rate_and_no_duration(tmp_path):
    """GLM's own way to their duration: up to the last one's second, and one more."""
    processor = make(tmp_path, "Glm4vVideoProcessor", fps=2)
    for frames, rate, expected in ((10, 4.0, [0, 2, 4, 6, 8, 9]), (7, 3.0, [0, 2, 3, 5, 6, 6])):
        assert processor.choose(Clip(frames, rate), {"do_sample_frames": True}, False) == expected


def test_who_chooses(tmp_path):
    """A caller's own frames are taken as they are; of a file as many as the checkpoint says, or 32."""
    plain = make(tmp_path, "LlavaOnevisionVideoProcessor")
    assert plain.choose(Clip(100, 25.0), {}, True) == list(range(100))
    assert len(plain.choose(Clip(100, 25.0), {}, False)) == 32
    assert plain.choose(Clip(3, 25.0), {}, False) == [0, 1, 2]
    assert plain.choose(Clip(100), {"num_frames": 4}, True) == [0, 25, 50, 75]
    assert len(plain.choose(Clip(100, 25.0), {"do_sample_frames": False}, False)) == 100
    says = make(tmp_path, "Qwen3VLVideoProcessor")
    assert len(says.choose(Clip(100, 25.0), {}, False)) == 8  # two a second
    assert len(says.choose(Clip(100, 25.0), {}, True)) == 100
    engine = VideoProcessor(tmp_path, MediaConfig(), "none", {"num_frames": 5})
    assert len(engine.choose(Clip(100, 25.0), engine.settings({}), False)) == 5
    assert len(engine.choose(Clip(100, 25.0), engine.settings({"fps": 1}), False)) == 4


def test_times(tmp_path):
    processor = make(tmp_path, "Qwen3VLVideoProcessor")
    times = processor.times(Clip(100, 25.0), [0, 50, 99])
    assert times["frame_times"].tolist() == [0.0, 2.0, 3.96] and times["sampled_fps"].tolist() == [0.75]
    assert processor.times(Clip(3), [0, 1, 2])["frame_times"].tolist() == [0.0, 1 / 24, 2 / 24]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fps": 0}, "fps=0 must be a number above 0"),
        ({"fps": True}, "fps=True"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"size": {"height": 8, "width": 8}}, "says lengths, .* min_pixels and max_pixels"),
        ({"num_frames": 0}, "num_frames=0 must be from 1 to max_video_frames=9"),
        ({"num_frames": 10}, "max_video_frames=9"),
        ({"fps": 1, "num_frames": 2}, "exclude each other"),
        ({"do_sample_frames": 1}, "true or false"),
        ({"patch_size": 7}, "has no setting 'patch_size'"),
        ({"size": {"shortest_edge": 1, "longest_edge": 10**9}}, "max_video_pixels=5,000"),
        ({"image_std": [1e-30] * 3}, "no model can work"),
    ],
)
def test_settings_that_are_refused(settings, message, tmp_path):
    config = MediaConfig(max_video_frames=9, max_video_pixels=5000)
    processor = make(tmp_path, "Qwen2VLVideoProcessor", config)
    with pytest.raises(RequestError, match=message):
        processor.settings(settings)


def test_more_than_may_be_is_refused_before_any_work(tmp_path):
    config = MediaConfig(max_video_frames=9, max_video_pixels=5000)
    processor = make(tmp_path, "LlavaOnevisionVideoProcessor", config, size={"height": 20, "width": 20})
    assert processor.plan(9, 4000, 4000, {}).pixels == 3600
    with pytest.raises(ValueError, match="6,400 pixels, and 5,000 are allowed"):
        processor.plan(16, 4, 4, {})
    with pytest.raises(ValueError, match="10 frames would be taken, and 9 are allowed"):
        processor.choose(Clip(10), {}, True)
    with pytest.raises(ValueError, match="fps=2 needs to know how many frames a second"):
        processor.choose(Clip(9), {"fps": 2}, True)


def test_digests_tell_apart_what_a_model_sees_otherwise(tmp_path):
    processor = make(tmp_path, "Qwen2VLVideoProcessor")
    times = torch.zeros(2, dtype=torch.float64)
    one = processor.digest(b"frames", times, {})
    assert one == processor.digest(b"frames", times, {"fps": 2})  # which chose these frames
    others = [(b"other", times, {}), (b"frames", times + 1, {}), (b"frames", times, {"do_rescale": False})]
    assert len({one, *(processor.digest(*given) for given in others)}) == 4


def test_a_processor_that_is_not_known(tmp_path):
    with pytest.raises(CheckpointError, match="TimesformerVideoProcessor, which quire does not know"):
        make(tmp_path, "TimesformerVideoProcessor")
