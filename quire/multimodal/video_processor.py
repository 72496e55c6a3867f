"""Frames to what a model's tower takes, by the rules of the checkpoint's video processor.

transformers' own video processors compute with torchvision, which quire does not ask for: what they do to a frame is
resizing, cropping and normalizing, and that is here, on torch. `FAMILIES` has what differs between their classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from quire.config import MediaConfig
from quire.errors import CheckpointError, RequestError
from quire.multimodal import video_sampling as sampling
from quire.multimodal.frames import cropped, longest_size, normalized, patched_size, patches, resize, scaled_size
from quire.multimodal.processor_settings import Most, as_floats, check_counts_pixels, check_peak, check_setting
from quire.multimodal.video_sampling import Clip, Rule

# The first that is there says it all; in the first of them, under this name.
_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_PART = "video_processor"
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
_HALF_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_ALL = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
_MODES = {0: "nearest-exact", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # of Pillow's numbers
_FILE_FRAMES = 32  # of a file, where neither the checkpoint nor a caller says how many
_DEFAULT_RATE = 24.0  # frames a second, where nobody knows: transformers' choice


@dataclass(frozen=True, slots=True)
class Family:
    """What a class of video processors does.

    rule: chooses frames. form: "frames": each by itself, resized and cropped; "patches": cut up into patches, each
    frame resized within numbers of pixels; "all patches": those numbers are all frames' together; "squares": resized
    twice, the second time to a square. defaults: of its settings.
    """

    rule: Rule
    form: Literal["frames", "patches", "all patches", "squares"]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PATCHES = {
    **_ALL, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    # quire's own, for a LLaVA that takes videos: transformers has none.
    "LlavaVideoProcessor": Family(
        sampling.from_end_to_end, "frames",
        {**_ALL, **_CLIP_COLOURS, "size": {"height": 336, "width": 336}, "do_sample_frames": True, "fps": 2,
         "min_frames": 2, "max_frames": 8},
    ),
    "LlavaNextVideoVideoProcessor": Family(
        sampling.evenly, "frames",
        {**_ALL, **_CLIP_COLOURS, "size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224},
         "do_center_crop": True, "do_sample_frames": False},
    ),
    "LlavaOnevisionVideoProcessor": Family(
        sampling.evenly, "frames",
        {**_ALL, **_CLIP_COLOURS, "size": {"height": 384, "width": 384}, "do_sample_frames": False},
    ),
    "InternVLVideoProcessor": Family(
        sampling.from_middles, "frames",
        {**_ALL, **_CLIP_COLOURS, "size": {"height": 384, "width": 384}, "do_sample_frames": False,
         "initial_shift": True},
    ),
    "Qwen2VLVideoProcessor": Family(
        sampling.by_pairs, "patches",
        {**_PATCHES, **_CLIP_COLOURS, "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
         "do_sample_frames": False, "max_video_tokens": 128_000},
    ),
    "Qwen3VLVideoProcessor": Family(
        sampling.from_end_to_end, "all patches",
        {**_PATCHES, **_HALF_COLOURS, "patch_size": 16, "size": {"shortest_edge": 128 * 32 * 32,
         "longest_edge": 32 * 32 * 768}, "do_sample_frames": True, "fps": 2, "max_video_tokens": 768},
    ),
    "Glm4vVideoProcessor": Family(
        sampling.by_seconds, "all patches",
        {**_PATCHES, **_CLIP_COLOURS, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000},
         "do_sample_frames": True, "fps": 2, "max_duration": 300},
    ),
    "SmolVLMVideoProcessor": Family(
        sampling.within_edges, "squares",
        {**_ALL, **_HALF_COLOURS, "resample": 1, "size": {"longest_edge": 4 * 364},
         "max_image_size": {"longest_edge": 364}, "do_sample_frames": False, "do_pad": True},
    ),
}  # fmt: skip

# What a caller may set beside what says how pixels are treated.
_CHOICE = ("fps", "num_frames", "do_sample_frames")
_TREATMENT = {
    "crop_size", "do_center_crop", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std",
    "rescale_factor", "size", "min_pixels", "max_pixels",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """What a video will be made into. frames, final: so many of (height, width)."""

    frames: int
    final: tuple[int, int]

    @property
    def pixels(self) -> int:
        """Of all frames together."""
        return self.frames * self.final[0] * self.final[1]


class VideoProcessor:
    """Frames to what a tower takes. Any number of threads may call it at once.

    path: of the checkpoint, whose model is of `model_type`. settings: of every video, on top of the checkpoint's; a
    request's own come on top of those. Raises CheckpointError where the class of the checkpoint's processor is not
    one of FAMILIES, and RequestError for settings that it does not know.
    """

    def __init__(
        self, path: Path, config: MediaConfig, model_type: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        given = _read(path)
        self.name = str(given.get("video_processor_type") or _class_of(model_type))
        if self.name not in FAMILIES:
            raise CheckpointError(
                f"{path}: videos are prepared by {self.name}, which quire does not know; it knows "
                f"{', '.join(sorted(FAMILIES))}"
            )
        self.family = FAMILIES[self.name]
        self._config = config
        self.known = _settled(self.family.defaults, given)
        self._settings: dict[str, Any] = {}
        self._settings = self.settings(dict(config.io_settings.get("video") or {}) | dict(settings or {}))
        known = json.dumps([self.name, self.known], sort_keys=True, default=repr)
        self._fingerprint = hashlib.sha256(known.encode()).digest()

    @property
    def _has_patches(self) -> bool:
        """Whether `size` says numbers of pixels, and not lengths."""
        return self.family.form in ("patches", "all patches")

    @property
    def setting_names(self) -> set[str]:
        """What a caller may set."""
        without = {"crop_size", "do_center_crop"} if self.family.form != "frames" else set()
        if not self._has_patches:
            without |= {"min_pixels", "max_pixels"}
        if self.family.rule is sampling.by_seconds:  # which goes by fps alone
            without |= {"num_frames"}
        return (_TREATMENT | set(_CHOICE)) - without

    def keep(self, given: Mapping[str, Any]) -> None:
        """Have all requests begin with these. Raises RequestError for a wrong one."""
        self._settings = self.settings(given)

    def settings(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's settings with a caller's on top. Raises RequestError for a wrong one."""
        if not given:
            return self._settings
        for name, value in given.items():
            if name not in self.setting_names:
                raise RequestError(
                    f"mm_processor_kwargs: {self.name} has no setting {str(name)[:40]!r}; it has "
                    f"{', '.join(sorted(self.setting_names))}"
                )
            self._check_value(name, value)
        both = {**self._settings, **{name: as_floats(name, value) for name, value in given.items()}}
        for one, other in (("fps", "num_frames"), ("num_frames", "fps")):
            if given.get(one) is not None and given.get(other) is None:
                both.pop(other, None)  # the engine's own, which this replaces
        if both.get("fps") is not None and both.get("num_frames") is not None and self.family.form != "squares":
            raise RequestError("mm_processor_kwargs: fps and num_frames exclude each other: give one")
        check_peak(given, {**self.known, **both})
        return both

    def _check_value(self, name: str, value: Any) -> None:
        shown = repr(value)[:100]
        if name == "fps":
            if type(value) not in (int, float) or not 0 < value <= 1000:
                raise RequestError(f"mm_processor_kwargs: fps={shown} must be a number above 0, and 1000 at most")
        elif name == "num_frames":
            most = self._config.max_video_frames
            if type(value) is not int or not 1 <= value <= most:
                raise RequestError(f"mm_processor_kwargs: num_frames={shown} must be from 1 to max_video_frames={most}")
        else:
            forms = {"squares": {"longest_edge"}, "frames": {"shortest_edge"}}
            sizes = forms.get(self.family.form, {"shortest_edge", "longest_edge"})
            if self._has_patches:
                check_counts_pixels(name, value)
            limit = Most(self._config.max_video_pixels, "max_video_pixels")
            check_setting(name, value, limit, [sizes], self._has_patches)

    def choose(self, clip: Clip, settings: Mapping[str, Any], as_given: bool) -> list[int]:
        """The frames to take of a video, ascending.

        as_given: its frames are a caller's own choice: they are all taken, unless the caller's settings ask for fewer.
        Raises ValueError for more than may be, and where the settings cannot hold.
        """
        values = {**self.known, **settings}
        asked = any(settings.get(name) is not None for name in ("fps", "num_frames"))
        says = values["do_sample_frames"] or any(self.known.get(name) is not None for name in ("fps", "num_frames"))
        sample = settings.get("do_sample_frames", asked or (says and not as_given))
        if asked and not sample:
            raise ValueError("do_sample_frames=False takes all frames, and fps or num_frames asks for some")
        if asked:  # what is asked for replaces what the checkpoint says of the other
            values.update({name: settings.get(name, self._beside(name)) for name in ("fps", "num_frames")})
        if sample:
            chosen = [int(place) for place in self.family.rule(clip, values)]
        elif as_given or "do_sample_frames" in settings:
            chosen = list(range(clip.frames))
        else:  # of a file, of which nobody says how many: as many as in vLLM
            chosen = list(sampling.evenly(clip, {"num_frames": min(clip.frames, _FILE_FRAMES)}))
        if not chosen:
            raise ValueError("it has no frames to take")
        if len(chosen) > self._config.max_video_frames:
            raise ValueError(
                f"{len(chosen)} frames would be taken, and {self._config.max_video_frames} are allowed: ask for fewer "
                "by num_frames or fps, or raise max_video_frames"
            )
        return chosen

    def _beside(self, name: str) -> Any:
        """SmolVLM's rule has need of both; the others' of what is asked for alone."""
        return self.known.get(name) if self.family.form == "squares" else None

    def plan(self, frames: int, height: int, width: int, settings: Mapping[str, Any]) -> VideoPlan:
        """What so many frames of a size will be made into. Raises ValueError where that is more than may be."""
        values = {**self.known, **settings}
        if self._has_patches:
            final = patched_size(frames, height, width, values, together=self.family.form == "all patches")
        elif self.family.form == "squares":
            side = values["max_image_size"]["longest_edge"]
            final = (side, side) if values["do_resize"] else (height, width)
        else:
            final = scaled_size(height, width, values)
            crop = values.get("crop_size")
            final = (crop["height"], crop["width"]) if values.get("do_center_crop") and crop else final
        group = values.get("temporal_patch_size", 1)
        plan = VideoPlan(-(-frames // group) * group, final)
        if plan.pixels > self._config.max_video_pixels:
            raise ValueError(
                f"{frames} frames of {width} x {height} become {plan.pixels:,} pixels, and "
                f"{self._config.max_video_pixels:,} are allowed: take fewer frames (num_frames, fps), ask for a "
                "smaller size, or raise max_video_pixels"
            )
        return plan

    def resized(self, frame: torch.Tensor, plan: VideoPlan, settings: Mapping[str, Any]) -> torch.Tensor:
        """One frame, [3, H, W] uint8, in the size that the plan says."""
        values = {**self.known, **settings}
        mode = _MODES.get(values["resample"], "bicubic")
        if not values["do_resize"]:
            pass
        elif self.family.form == "squares":
            frame = resize(resize(frame, longest_size(frame, values["size"]), mode), plan.final, mode)
        elif self.family.form == "frames":
            frame = resize(frame, scaled_size(frame.shape[1], frame.shape[2], values), mode)
        else:
            frame = resize(frame, plan.final, mode)
        return cropped(frame, plan.final) if values.get("do_center_crop") and values.get("crop_size") else frame

    def finish(self, frames: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the model's tower takes of resized frames, as transformers' processor names it, as a batch of one."""
        values = {**self.known, **settings}
        video = normalized(torch.stack(list(frames)), values)
        if self._has_patches:
            return patches(video, values)
        if self.family.form == "squares":
            mask = torch.ones((1, len(video), *video.shape[2:]), dtype=torch.int64)
            return {"pixel_values": video[None], "pixel_attention_mask": mask}
        return {"pixel_values_videos": video[None]}

    def times(self, clip: Clip, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """When the frames are shown, in seconds, [T] float64, how many of them a second, [1], and how long it lasts,
        if somebody said so, [1]; as transformers' `VideoMetadata` has them."""
        rate = clip.rate or _DEFAULT_RATE
        sampled = len(chosen) / clip.frames * rate
        times = {
            "frame_times": torch.tensor([place / rate for place in chosen], dtype=torch.float64),
            "sampled_fps": torch.tensor([sampled if clip.rate else _DEFAULT_RATE], dtype=torch.float64),
        }
        if clip.duration is not None:
            times["duration"] = torch.tensor([clip.duration], dtype=torch.float64)
        return times

    def digest(self, frames: bytes, times: torch.Tensor, settings: Mapping[str, Any]) -> bytes:
        """The same for frames (by their digest), times and settings of which the model sees the same."""
        treatment = {name: value for name, value in settings.items() if name not in _CHOICE}
        own = json.dumps(treatment, sort_keys=True).encode()
        return hashlib.sha256(self._fingerprint + frames + times.numpy().tobytes() + own).digest()


def _read(path: Path) -> dict[str, Any]:
    """The settings of the checkpoint's video processor, from the first file that has them."""
    for name in _FILES:
        file = path / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}).") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{file}: holds a {type(found).__name__}, not an object.")
        if name != _FILES[0]:
            return found
        if isinstance(found.get(_PART), dict):
            return dict(found[_PART])
    return {}


def _class_of(model_type: str) -> str:
    """The class of video processors that transformers takes for a model whose files do not name one."""
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    found = VIDEO_PROCESSOR_MAPPING_NAMES.get(model_type)
    return str(found.get("torchvision") if isinstance(found, Mapping) else found)


def _settled(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in their later form: those of before transformers 4.52 say some things otherwise."""
    values, old = {**defaults, **given}, given.get("video_sampling")
    if isinstance(old, Mapping):
        values.update(num_frames=old["max_frames"], fps=old["fps"], size=given.get("size", old["video_size"]))
    for name, square in (("size", False), ("crop_size", True)):
        if isinstance(values.get(name), int):
            side = values[name]
            values[name] = {"height": side, "width": side} if square else {"shortest_edge": side}
    size = dict(values.get("size") or {})
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if values.get(name) is not None and "patch_size" in values:
            size[edge] = values[name]
    return {**values, "size": size}
