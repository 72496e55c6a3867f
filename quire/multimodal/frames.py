"""What happens to a video's frames: their sizes, resizing, cropping, normalizing, and cutting into patches.

As transformers' video processors compute it with torchvision, on torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import interpolate, pad

_MOST_RATIO = 200  # of a frame's sides, in models with patches
_MOST_SIDE = 4096  # SmolVLM's, before the last resize


def patched_size(frames: int, height: int, width: int, values: Mapping[str, Any], together: bool) -> tuple[int, int]:
    """Both sides as multiples of a group of patches, near the frame's own, or within numbers of pixels: of a frame,
    or of all of them `together`."""
    group, span = values["patch_size"] * values["merge_size"], values["temporal_patch_size"]
    least = values.get("min_pixels") or values["size"]["shortest_edge"]
    most = values.get("max_pixels") or values["size"]["longest_edge"]
    counted = frames if together else 1
    if together and frames < span:
        raise ValueError(f"{frames} frame, and this model takes {span} at least: give more")
    if values.get("cap_pixels_per_frame"):
        tokens = values["max_video_tokens"] * group * group
        share = min(tokens, most // frames) if together else min(most, int(tokens * 0.9) * span // frames)
        most = counted * max(share, int(least * 1.05))
    if together and min(height, width) < group:
        scale = max(group / height, group / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise ValueError(f"its frames of {width} x {height} have one side more than {_MOST_RATIO} times the other")
    if not values["do_resize"]:
        return height, width
    rows, columns = (round(side / group) * group for side in (height, width))
    rounded = round(frames / span) * span if together else 1
    if rounded * rows * columns > most:
        factor = math.sqrt(counted * height * width / most)
        rows, columns = (max(group, math.floor(side / factor / group) * group) for side in (height, width))
    elif rounded * rows * columns < least:
        factor = math.sqrt(least / (counted * height * width))
        rows, columns = (math.ceil(side * factor / group) * group for side in (height, width))
    return rows, columns


def scaled_size(height: int, width: int, values: Mapping[str, Any]) -> tuple[int, int]:
    """After resizing to a height and a width, or until the shorter side has its length."""
    if not values["do_resize"]:
        return height, width
    size = values["size"]
    if size.get("height") and size.get("width"):
        return size["height"], size["width"]
    edge = size["shortest_edge"]
    longer = int(edge * max(height, width) / min(height, width))
    return (edge, longer) if height <= width else (longer, edge)


def longest_size(frame: torch.Tensor, size: Mapping[str, int]) -> tuple[int, int]:
    """SmolVLM's: the longer side as said, the other an even number in the same proportion."""
    if "longest_edge" not in size:
        return size["height"], size["width"]
    height, width = frame.shape[1:]
    edge = min(_MOST_SIDE, size["longest_edge"])
    shorter = int(edge / (width / height)) if width >= height else int(edge * (width / height))
    shorter = max(1, shorter + shorter % 2)
    return (shorter, edge) if width >= height else (edge, shorter)


def resize(frame: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    if tuple(frame.shape[1:]) == tuple(size):
        return frame
    if mode == "nearest-exact":
        return interpolate(frame[None], size=list(size), mode=mode)[0]
    try:
        return interpolate(frame[None], size=list(size), mode=mode, align_corners=False, antialias=True)[0]
    except (NotImplementedError, ValueError):  # a torch that has not this filter: transformers does the same then
        return interpolate(frame[None], size=list(size), mode="bicubic", align_corners=False, antialias=True)[0]


def cropped(frame: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The middle of it; what is smaller gets a black border first."""
    missing = [max(0, wanted - have) for wanted, have in zip(size, frame.shape[1:], strict=True)]
    if any(missing):
        rows, columns = missing
        frame = pad(frame, (columns // 2, (columns + 1) // 2, rows // 2, (rows + 1) // 2))
    top, left = (int((have - wanted) / 2) for wanted, have in zip(size, frame.shape[1:], strict=True))
    return frame[:, top : top + size[0], left : left + size[1]]


def normalized(video: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """[T, 3, H, W] uint8 -> float32."""
    scale = values["rescale_factor"] if values["do_rescale"] else 1.0
    if not values["do_normalize"]:
        return video * scale if values["do_rescale"] else video.float()
    # Mean and deviation are scaled instead of each pixel.
    mean, spread = (
        (torch.tensor(values[name], dtype=torch.float32) * (1.0 / scale)).reshape(-1, 1, 1)
        for name in ("image_mean", "image_std")
    )
    return video.float().sub_(mean).div_(spread)


def patches(video: torch.Tensor, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """[T, 3, H, W] -> a row for each patch, those that are merged later side by side; the last frame fills a group."""
    span, patch, merge = values["temporal_patch_size"], values["patch_size"], values["merge_size"]
    if missing := -len(video) % span:
        video = torch.cat((video, video[-1:].expand(missing, -1, -1, -1)))
    time, rows, columns = len(video) // span, video.shape[2] // patch, video.shape[3] // patch
    cut = video.view(time, span, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    flat = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * rows * columns, -1)
    return {"pixel_values_videos": flat, "video_grid_thw": torch.tensor([[time, rows, columns]])}
