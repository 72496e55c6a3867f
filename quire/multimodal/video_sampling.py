"""Which frames of a video a model sees, by the rules of Hugging Face's video processors.

Each rule is the `sample_frames` of one class of transformers' (4.56 and later), from the number of frames, their rate
and what was asked for to indices, ascending; a rule that cannot hold raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Clip:
    """What is known of a video before frames are chosen.

    frames: how many it has. rate: frames a second; None: nobody knows. duration: seconds; None: frames / rate.
    """

    frames: int
    rate: float | None = None
    duration: float | None = None

    @property
    def seconds(self) -> float | None:
        """How long it is, if that is known."""
        if self.duration is not None:
            return self.duration
        return None if not self.rate else self.frames / self.rate


Rule = Callable[[Clip, Mapping[str, Any]], Sequence[int]]


def _count_at(clip: Clip, fps: float) -> float:
    """How many frames there are at so many a second."""
    if not clip.rate:
        raise ValueError(f"fps={fps:g} needs to know how many frames a second it has: give that, or num_frames")
    return clip.frames / clip.rate * fps


def _check_count(count: float, clip: Clip) -> None:
    if count > clip.frames:
        raise ValueError(f"{count:g} frames are asked for, and it has {clip.frames}: ask for fewer")
    if count < 1:
        raise ValueError("less than one frame is asked for: ask for more")


def evenly(clip: Clip, values: Mapping[str, Any]) -> Sequence[int]:
    """The rule of all that have none of their own: `num_frames`, or so many as `fps` makes, at equal distances."""
    count = values.get("num_frames")
    if count is None and values.get("fps") is not None:
        count = max(1, int(_count_at(clip, values["fps"])))
    if count is None:
        return range(clip.frames)
    _check_count(count, clip)
    return [place * clip.frames // count for place in range(count)]


def by_pairs(clip: Clip, values: Mapping[str, Any]) -> Sequence[int]:
    """Qwen2-VL's and Qwen2.5-VL's: a number that fills groups of `temporal_patch_size` frames."""
    group, count = values["temporal_patch_size"], values.get("num_frames")
    if count is not None:
        count = round(count / group) * group
    elif values.get("fps") is not None:
        most = math.floor(min(values["max_frames"], clip.frames) / group) * group
        wanted = min(max(_count_at(clip, values["fps"]), values["min_frames"]), most, clip.frames)
        count = math.floor(wanted / group) * group
    if count is None:
        return range(clip.frames)
    _check_count(count, clip)
    return [int(place) for place in torch.arange(0, clip.frames, clip.frames / count)]


def from_end_to_end(clip: Clip, values: Mapping[str, Any]) -> Sequence[int]:
    """Qwen3-VL's: the first frame, the last, and others at equal distances; some twice where there are too few."""
    count, rate = values.get("num_frames"), clip.rate or 24
    least, most = values["min_frames"], values["max_frames"]
    if count is None and values.get("fps") is not None:
        count = min(max(int(clip.frames / rate * values["fps"]), least), most, clip.frames)
    if count is None:
        count = min(max(clip.frames, least), most)
    return [int(place) for place in np.linspace(0, clip.frames - 1, count).round()]


def from_middles(clip: Clip, values: Mapping[str, Any]) -> Sequence[int]:
    """InternVL's: the middle frame of each of `num_frames` parts."""
    count = values.get("num_frames")
    if count is None and values.get("fps") is not None:
        count = int(_count_at(clip, values["fps"]))
    if count is None:
        return range(clip.frames)
    _check_count(count, clip)
    shift = values.get("initial_shift", True)
    begin = clip.frames / count / 2 if shift is True else float(shift)
    return [int(place) for place in torch.arange(begin, clip.frames, clip.frames / count)]


def by_seconds(clip: Clip, values: Mapping[str, Any]) -> Sequence[int]:
    """GLM-4.1V's: `fps` frames a second, up to a duration; an even number of them."""
    fps, last = values["fps"], clip.frames - 1
    if not clip.rate:
        raise ValueError("this model needs to know how many frames a second it has: give that")
    duration = clip.duration or round(last / clip.rate) + 1
    if duration <= values["max_duration"]:
        count = max(int(duration * fps), 1)
        places = [min(last, math.ceil(number * clip.rate / fps)) for number in range(count)]
    elif (count := int(values["max_duration"] * fps)) >= clip.frames:
        places = list(range(clip.frames))
    else:
        places = [min(last, math.ceil(second * clip.rate)) for second in np.linspace(0, duration, count)]
    found = list(dict.fromkeys(places))
    return found + found[-1:] if len(found) % 2 else found


def within_edges(clip: Clip, values: Mapping[str, Any]) -> Sequence[int]:
    """SmolVLM's: at most `num_frames` and at most `fps` a second, without a second at either end of a long video."""
    most, fps, skipped = values["num_frames"], values["fps"], values.get("skip_secs", 1)
    seconds = clip.seconds
    if not clip.rate or seconds is None:
        raise ValueError("this model needs to know how many frames a second it has: give that")
    count = max(1, min(round(fps * seconds), most))
    first, last = 0, clip.frames - 1
    if skipped > 0 and seconds - 2 * skipped > most * fps:
        first, last = int(skipped * clip.rate), min(int(clip.frames - skipped * clip.rate), last)
    if first >= last:
        first, last = 0, clip.frames - 1
    return [int(place) for place in np.unique(np.linspace(first, last, count, dtype=int))]
