"""Qwen3-VL's videos next to transformers: placeholders with each frame's time, positions, features of all levels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire.config import MediaConfig
from quire.models.loader import load_model
from quire.models.qwen3_vl import Qwen3VLForConditionalGeneration
from quire.multimodal.video_processor import VideoProcessor
from quire.types import PlaceholderRange
from tests.multimodal.clips import clip as frames_of
from tests.multimodal.open_engine import ask, greedy, nothing_left, open_llm
from tests.multimodal.tiny_vision import VOCAB, Oracle, build

KIND = "Qwen3VLForConditionalGeneration"
VIDEO, START, END = VOCAB - 2, VOCAB - 3, VOCAB - 4
# frames, rows and columns of patches, frames a second
CLIPS = [(4, 4, 6, 2.0), (6, 8, 4, 29.97), (3, 4, 4, 24.0)]


@pytest.fixture(scope="module", params=["deepstack", "tied"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """(transformers' model, ours, the tokenizer)"""
    oracle = Oracle(KIND, request.param)
    path: Path = build(KIND, request.param, tmp_path_factory.mktemp(request.param), oracle.model)
    model, tokenizer = load_model(path), transformers.AutoTokenizer.from_pretrained(path)
    model.read_processor({}, lambda text: tokenizer.encode(text, add_special_tokens=False))
    return oracle.model, model, tokenizer


def clip(model: Qwen3VLForConditionalGeneration, frames: int, rows: int, columns: int, rate: float) -> dict[str, Any]:
    """What the video processor returns of frames that are random numbers, every third of a file's."""
    groups = -(-frames // model.span)
    generator = torch.Generator().manual_seed(frames)
    return {
        "pixel_values_videos": torch.randn(groups * rows * columns, model.columns, generator=generator),
        "video_grid_thw": torch.tensor([[groups, rows, columns]]),
        "frame_times": torch.tensor([3 * place / rate for place in range(frames)], dtype=torch.float64),
    }


@pytest.mark.parametrize("shape", CLIPS)
def test_placeholders_are_transformers(both: tuple[Any, Any, Any], shape: tuple[int, int, int, float]) -> None:
    _, model, tokenizer = both
    inputs = clip(model, *shape)
    layout = model.video_layout(inputs)
    theirs = transformers.Qwen3VLProcessor.__new__(transformers.Qwen3VLProcessor)
    theirs.video_processor = SimpleNamespace(merge_size=model.merge, temporal_patch_size=model.span)
    theirs.video_token, theirs.vision_start_token, theirs.vision_end_token = (
        tokenizer.convert_ids_to_tokens(token) for token in (VIDEO, START, END)
    )
    metadata = SimpleNamespace(fps=shape[3], frames_indices=[3 * place for place in range(shape[0])])
    text = theirs.replace_video_token({**inputs, "video_metadata": [metadata]}, 0)
    assert list(layout.ids) == tokenizer.encode(text, add_special_tokens=False)
    assert layout.mask == tuple(token == VIDEO for token in layout.ids)
    assert layout.features == int(inputs["video_grid_thw"].prod()) // model.merge**2


def test_positions_are_transformers(both: tuple[Any, Any, Any]) -> None:
    theirs, model, _ = both
    layouts = [model.video_layout(clip(model, *shape)) for shape in CLIPS[:2]]
    ids, media = [5, 6], []
    for number, layout in enumerate(layouts):
        media.append(PlaceholderRange.of(layout, bytes([number]), len(ids), "video"))
        ids += [*layout.ids, 7, 8, 9]
    grids = torch.cat([clip(model, *shape)["video_grid_thw"] for shape in CLIPS[:2]])
    kinds = torch.tensor([[2 * (token == VIDEO) for token in ids]])
    expected, _ = theirs.model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=kinds, video_grid_thw=grids)
    assert np.array_equal(model.rotary_positions(len(ids), media), expected[:, 0].numpy())


@pytest.mark.parametrize("shape", CLIPS)
def test_features_are_transformers(both: tuple[Any, Any, Any], shape: tuple[int, int, int, float]) -> None:
    theirs, model, _ = both
    inputs = clip(model, *shape)
    with torch.inference_mode():
        found = theirs.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        ours = model.encode_video(inputs)
    expected = torch.cat([level[0] for level in (found.pooler_output, *found.deepstack_features)], dim=-1)
    assert ours.shape == (model.video_layout(inputs).features, 32 * (1 + model.feature_levels))
    assert (ours - expected).abs().max() < 1e-4 and expected.std() > 0.1


def test_a_grid_that_does_not_fit(both: tuple[Any, Any, Any]) -> None:
    _, model, _ = both
    inputs = clip(model, 4, 3, 4, 2.0)
    with pytest.raises(ValueError, match="multiples of 2"):
        model.video_layout(inputs)
    inputs = clip(model, 4, 4, 4, 2.0)
    with pytest.raises(ValueError, match="their patch sizes differ"):
        model.video_layout({**inputs, "pixel_values_videos": inputs["pixel_values_videos"][:, :-1]})


SETTINGS = {
    "video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096}, "do_sample_frames": False,
}  # fmt: skip
RATE = 12.5


def answer(theirs: Any, processor: VideoProcessor, tokenizer: Any, ids: list[int], videos: list[Any]) -> Any:
    """(prompt, 32 greedy tokens) of transformers, alone, in float64; the videos' frames are each of a file's."""
    span = theirs.config.vision_config.temporal_patch_size
    given, texts = [], []
    for video in videos:
        plan = processor.plan(*video.shape[:3], {})
        frames = [torch.from_numpy(frame).permute(2, 0, 1).contiguous() for frame in video]
        given.append(processor.finish([processor.resized(frame, plan, {}) for frame in frames], {}))
        writer = transformers.Qwen3VLProcessor.__new__(transformers.Qwen3VLProcessor)
        merge = theirs.config.vision_config.spatial_merge_size
        writer.video_processor = SimpleNamespace(merge_size=merge, temporal_patch_size=span)
        names = tokenizer.convert_ids_to_tokens([VIDEO, START, END])
        writer.video_token, writer.vision_start_token, writer.vision_end_token = names
        metadata = SimpleNamespace(fps=RATE, frames_indices=list(range(len(video))))
        text = writer.replace_video_token({**given[-1], "video_metadata": [metadata]}, 0)
        texts.append(tokenizer.encode(text, add_special_tokens=False))
    placed = iter(texts)
    expanded = [token for one in ids for token in (next(placed) if one == VIDEO else [one])]
    with torch.inference_mode():
        out = theirs.generate(
            input_ids=torch.tensor([expanded]), attention_mask=torch.ones(1, len(expanded), dtype=torch.int64),
            mm_token_type_ids=torch.tensor([[2 * (token == VIDEO) for token in expanded]]), max_new_tokens=32,
            min_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0,
            pixel_values_videos=torch.cat([one["pixel_values_videos"] for one in given]).double(),
            video_grid_thw=torch.cat([one["video_grid_thw"] for one in given]),
        )  # fmt: skip
    return expanded, out[0, len(expanded) :].tolist()


def test_answers_are_transformers_alone_and_in_a_crowd(tmp_path: Path) -> None:
    oracle = Oracle(KIND, "deepstack")
    path = build(KIND, "deepstack", tmp_path, oracle.model)
    (path / "video_preprocessor_config.json").write_text(json.dumps(SETTINGS))
    processor, tokenizer = VideoProcessor(path, MediaConfig(), "none"), transformers.AutoTokenizer.from_pretrained(path)
    clips = [frames_of(1, 2), frames_of(2, 5, 24, 24), frames_of(3, 8, 30, 70)]
    asked = [
        ([5, VIDEO, 7, 8], clips[:1]), ([5, START, VIDEO, END, 7, VIDEO, 8, 9], clips[1:]), ([VIDEO, 9, 4], clips[2:]),
    ]  # fmt: skip
    rated = {"fps": RATE, "do_sample_frames": False}
    prompts = [
        {"prompt_token_ids": ids, "multi_modal_data": {"video": [(video, rated) for video in videos]}}
        for ids, videos in asked
    ]
    llm = open_llm(str(path), max_num_batched_tokens=13, block_size=4, num_gpu_blocks_override=72)
    outputs = ask(llm, prompts, greedy(32))
    nothing_left(llm)
    quiet = open_llm(str(path), enable_prefix_caching=False)
    theirs = oracle.model.double()
    for (ids, videos), prompt, output in zip(asked, prompts, outputs, strict=True):
        expanded, expected = answer(theirs, processor, tokenizer, ids, videos)
        assert list(output.prompt_token_ids) == expanded and VIDEO in expanded
        assert list(output.outputs[0].token_ids) == expected
        assert list(ask(quiet, [prompt], greedy(32))[0].outputs[0].token_ids) == expected
