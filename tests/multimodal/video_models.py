"""Every family that takes videos: tiny checkpoints with a video processor, and transformers' answers to compare with.

`VIDEO_FAMILIES` has what differs between families; `made` saves a variant; `VideoOracle` runs it in transformers, of
which the texts around frames are its own processors', too. Pixels are those of quire's video processors, which
test_video_processor.py holds against transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

from quire.config import MediaConfig
from quire.models.vision.video import in_words
from quire.multimodal.video_processor import VideoProcessor
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, SIDE, VOCAB, Oracle, build

VIDEO = VOCAB - 2  # the marker's id, of a family whose configuration has one
LEARNED = VOCAB  # of one whose tokenizer gets a token for it
processing_smolvlm.num2words = in_words  # the package is not installed; test_video_texts.py has what it says


@dataclass(frozen=True)
class VideoFamily:
    """settings: of the video processor, of the model's configuration. text: what transformers' processor writes for a
    video's marker, of (configuration, what its video processor returns, metadata); None: placeholders alone. marker:
    its token. placeholder: the token that takes features. together: whether the model takes pixels of images and
    videos as one tensor, in the prompt's order."""

    settings: Callable[[Any], dict[str, Any]]
    text: Callable[[Any, dict[str, Any], VideoMetadata], str] | None = None
    marker: int = VIDEO
    placeholder: int = VIDEO
    together: bool = False


@dataclass(frozen=True)
class Request:
    """ids: with markers. videos: frames [T, H, W, 3], or these and how many a second."""

    ids: list[int]
    videos: Sequence[Any] = ()
    images: Sequence[Any] = ()

    @property
    def prompt(self) -> dict[str, Any]:
        """As `LLM.generate` takes it; frames are taken as they are."""
        videos = [
            (one[0], {"fps": one[1], "do_sample_frames": False}) if isinstance(one, tuple) else one
            for one in self.videos
        ]
        data = {kind: list(given) for kind, given in (("video", videos), ("image", self.images)) if given}
        return {"prompt_token_ids": self.ids, **({"multi_modal_data": data} if data else {})}


def _patches(name: str, least: int, most: int) -> Callable[[Any], dict[str, Any]]:
    def settings(config: Any) -> dict[str, Any]:
        vision = config.vision_config
        return {
            "video_processor_type": name, "patch_size": vision.patch_size, "do_sample_frames": False,
            "temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.spatial_merge_size,
            "size": {"shortest_edge": least, "longest_edge": most},
        }  # fmt: skip

    return settings


def _squares(name: str, side: Callable[[Any], int] = lambda vision: SIDE, **more: Any) -> Any:
    def settings(config: Any) -> dict[str, Any]:
        edge = side(config.vision_config)
        return {"video_processor_type": name, "size": {"height": edge, "width": edge}, **more}

    return settings


def _smol_settings(config: Any) -> dict[str, Any]:
    side = config.vision_config.image_size
    return {
        "video_processor_type": "SmolVLMVideoProcessor", "max_image_size": {"longest_edge": side},
        "video_sampling": {"fps": 1, "max_frames": 6, "video_size": {"longest_edge": 2 * side}},
    }  # fmt: skip


def _qwen3_text(config: Any, inputs: dict[str, Any], metadata: VideoMetadata) -> str:
    vision, writer = config.vision_config, transformers.Qwen3VLProcessor.__new__(transformers.Qwen3VLProcessor)
    writer.video_processor = SimpleNamespace(
        merge_size=vision.spatial_merge_size, temporal_patch_size=vision.temporal_patch_size
    )
    words = FAMILIES["Qwen3VLForConditionalGeneration"].words
    writer.video_token = words[VIDEO]
    writer.vision_start_token, writer.vision_end_token = words[VOCAB - 3], words[VOCAB - 4]
    return writer.replace_video_token({**inputs, "video_metadata": [metadata]}, 0)


def _glm_text(config: Any, inputs: dict[str, Any], metadata: VideoMetadata) -> str:
    writer = Glm4vProcessor.__new__(Glm4vProcessor)
    writer.video_processor, writer.image_token = (
        SimpleNamespace(merge_size=config.vision_config.spatial_merge_size),
        (FAMILIES["Glm4vForConditionalGeneration"].words[IMAGE]),
    )
    grid = inputs["video_grid_thw"].numpy()
    return writer.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)


def _internvl_text(config: Any, inputs: dict[str, Any], metadata: VideoMetadata) -> str:
    vision = config.vision_config
    length = int((vision.image_size[0] // vision.patch_size[0] * config.downsample_ratio) ** 2)
    names = {"image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    return InternVLProcessor.replace_video_token(SimpleNamespace(image_seq_length=length, **names), inputs, 0)


def _smol_text(config: Any, inputs: dict[str, Any], metadata: VideoMetadata) -> str:
    vision = config.vision_config
    own = SimpleNamespace(
        image_seq_len=(vision.image_size // vision.patch_size // config.scale_factor) ** 2, image_token="<image>",
        fake_image_token="<fake_token_around_image>", global_image_token="<global-img>",
    )  # fmt: skip
    return processing_smolvlm.SmolVLMProcessor.replace_video_token(own, {**inputs, "video_metadata": [metadata]}, 0)


_QWEN2 = VideoFamily(_patches("Qwen2VLVideoProcessor", 64, 512))
_QWEN3 = VideoFamily(_patches("Qwen3VLVideoProcessor", 256, 4096), _qwen3_text)
_GLM = VideoFamily(_patches("Glm4vVideoProcessor", 256, 4096), _glm_text, placeholder=IMAGE)
VIDEO_FAMILIES: dict[str, VideoFamily] = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "LlavaOnevisionForConditionalGeneration": VideoFamily(_squares("LlavaOnevisionVideoProcessor")),
    "LlavaNextVideoForConditionalGeneration": VideoFamily(
        lambda config: {
            "video_processor_type": "LlavaNextVideoVideoProcessor", "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
        }
    ),
    "InternVLForConditionalGeneration": VideoFamily(
        _squares("InternVLVideoProcessor", lambda vision: vision.image_size[0]), _internvl_text,
        marker=LEARNED, placeholder=IMAGE, together=True,
    ),
    "SmolVLMForConditionalGeneration": VideoFamily(
        _smol_settings, _smol_text, marker=LEARNED, placeholder=IMAGE, together=True
    ),
}  # fmt: skip


def first_variant(architecture: str) -> str:
    family = FAMILIES[architecture]
    return (family.quick or tuple(family.variants))[0]


EACH = [(architecture, first_variant(architecture)) for architecture in VIDEO_FAMILIES]
CASES = [
    pytest.param(
        architecture, variant, marks=() if variant == first_variant(architecture) else pytest.mark.slow
    )
    for architecture in VIDEO_FAMILIES
    for variant in FAMILIES[architecture].variants
]  # fmt: skip


def made(architecture: str, variant: str, folder: Path, model: Any = None) -> str:
    """Save a variant with its image and video processors."""
    path = build(architecture, variant, folder, model)
    family = FAMILIES[architecture]
    settings = VIDEO_FAMILIES[architecture].settings(family.config(family.variants[variant]))
    (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return str(path)


class VideoOracle:
    """A variant in transformers, saved at `path`."""

    def __init__(self, architecture: str, variant: str, folder: Path) -> None:
        self.images = Oracle(architecture, variant)
        self.model = self.images.model
        self.family = VIDEO_FAMILIES[architecture]
        self.path = made(architecture, variant, folder, self.model)
        self.processor = VideoProcessor(Path(self.path), MediaConfig(), "none")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.path)
        self.span = getattr(self.model.config.vision_config, "temporal_patch_size", 1)

    def inputs(self, video: np.ndarray) -> dict[str, torch.Tensor]:
        """What the tower takes of all frames of a video."""
        plan = self.processor.plan(*video.shape[:3], {})
        frames = [torch.from_numpy(frame).permute(2, 0, 1).contiguous() for frame in video]
        return self.processor.finish([self.processor.resized(frame, plan, {}) for frame in frames], {})

    @torch.inference_mode()
    def features(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """[features, E * (1 + levels)]"""
        if self.family.together:
            given = dict(inputs)
            if "pixel_values_videos" in given:
                given = {"pixel_values": given["pixel_values_videos"][0]}
            return self.images.family.features(self.model.get_image_features(**given).pooler_output)
        found = self.model.get_video_features(**inputs)
        levels = getattr(found, "deepstack_features", None) or ()
        return torch.cat([level[0] for level in (found.pooler_output, *levels)], dim=-1)

    def ids(self, video: np.ndarray, rate: float | None = None) -> list[int]:
        """What stands for a video in a prompt, as the family's own processor writes it."""
        inputs = self.inputs(video)
        if self.family.text is None:
            return [self.family.placeholder] * len(self.features(inputs))
        return self.tokenizer.encode(self.text(video, rate), add_special_tokens=False)

    def text(self, video: np.ndarray, rate: float | None = None, duration: float | None = None) -> str:
        assert self.family.text is not None
        metadata = VideoMetadata(len(video), rate, duration=duration, frames_indices=list(range(len(video))))
        return self.family.text(self.model.config, self.inputs(video), metadata)

    def expanded(self, request: Request) -> tuple[list[int], dict[str, Any]]:
        """(ids with all placeholders, what the model takes beside them), in float32."""
        videos, images = iter(request.videos), iter(request.images)
        ids, kinds, pixels, seconds, grids = [], [], [], [], []
        stacked: list[torch.Tensor] = []
        for token in request.ids:
            if token == self.family.marker:
                given = next(videos)
                video, rate = given if isinstance(given, tuple) else (given, None)
                own, inputs = self.ids(video, rate), self.inputs(video)
                kinds += [2 * (one == self.family.placeholder) for one in own]
                if self.family.together:
                    found = inputs.get("pixel_values", inputs.get("pixel_values_videos"))
                    pixels.append(found[0])
                else:
                    stacked.append(inputs["pixel_values_videos"])
                grids += [inputs["video_grid_thw"]] if "video_grid_thw" in inputs else []
                seconds.append(self.span / (rate or 24))
            elif token == IMAGE:
                image = next(images)
                own = self.images.ids(self.tokenizer, image)
                kinds += [int(one == IMAGE) for one in own]
                if self.family.together:
                    found = self.images.inputs(image)["pixel_values"]
                    pixels.append(found[0] if found.dim() == 5 else found)
            else:
                own = [token]
                kinds.append(0)
            ids += own
        more: dict[str, Any] = {}
        if pixels:
            whole = torch.cat(pixels)
            more["pixel_values"] = whole[None] if "SmolVLM" in type(self.model).__name__ else whole
        elif request.images:
            more |= self.images.inputs(list(request.images))
        if stacked:
            more["pixel_values_videos"] = torch.cat(stacked)
        if grids:
            more["video_grid_thw"] = torch.cat(grids)
        if stacked and hasattr(self.model.config.vision_config, "tokens_per_second"):
            more["second_per_grid_ts"] = torch.tensor(seconds)
        if self.images.mrope:
            more["mm_token_type_ids"] = torch.tensor([kinds])
        if "image_grid_thw" in more and grids and self.family.placeholder == IMAGE:
            self._tell_apart(torch.tensor([kinds]))
        return ids, more

    def _tell_apart(self, kinds: torch.Tensor) -> None:
        """Have GLM's model know which of a prompt's image tokens are a video's: it takes all of them for images'."""

        def masks(input_ids: Any, embeds: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return tuple((kinds == kind)[..., None].expand_as(embeds) for kind in (1, 2))  # type: ignore[return-value]

        self.model.model.get_placeholder_mask = masks

    @torch.inference_mode()
    def answer(self, request: Request, tokens: int) -> tuple[list[int], list[int]]:
        """(expanded prompt, greedy tokens), run alone, in float64."""
        ids, more = self.expanded(request)
        more = {
            name: one.double() if one.is_floating_point() and "pixel" in name else one for name, one in more.items()
        }
        wide = self.model.double()
        try:
            out = wide.generate(
                input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
                **more,
            )  # fmt: skip
        finally:
            self.model.float()
            self.model.model.__dict__.pop("get_placeholder_mask", None)
        return ids, out[0, len(ids) :].tolist()
