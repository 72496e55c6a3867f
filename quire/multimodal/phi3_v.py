"""Phi-3-vision's image processor, which is code in its checkpoints: an image in square crops, and once more as a whole.

The image is scaled to as many crops as are allowed and fit its shape (arXiv:2404.06512), its longer edge to a multiple
of a crop's side; what the other lacks is white, one half of it on each side. The whole is that picture, scaled down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from quire.errors import RequestError
from quire.multimodal.plans import Plan, ProcessorKind
from quire.multimodal.processor_settings import MOST_TILES

_FLOATS = 4  # times the memory of a pixel that processing takes, as all of the picture becomes floats
_WHITE = (255, 255, 255)
# CLIP's, where a file has none.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def plan_crops(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """The size of the picture that is cut into crops."""
    side = values["crop_size"]
    long, short = _scaled(height, width, side, values["num_crops"])
    short = -(-short // side) * side
    pixels = long * short + side * side
    return Plan((short, long) if width >= height else (long, short), _FLOATS * pixels, _FLOATS)


def _scaled(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """What an image's longer and shorter edge are scaled to. Raises RequestError where that leaves nothing of one."""
    ratio, count = max(height, width) / min(height, width), 1
    while (count + 1) * math.ceil((count + 1) / ratio) <= most:
        count += 1
    long, short = count * side, int(count * side / ratio)
    if short < 1:
        raise RequestError(f"{width} x {height} would become {long} pixels long and none wide: cut it")
    return long, short


class Phi3VImageProcessor:
    """num_crops: the most that an image is cut into. num_img_tokens: of a crop, as the file says it; None: it does not.

    Raises ValueError for settings that are none.
    """

    kind = ProcessorKind(plan_crops, takes=frozenset({"num_crops", "image_mean", "image_std"}), sizes=())

    def __init__(
        self,
        num_crops: int = 1,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        num_img_tokens: int | None = None,
    ) -> None:
        self.num_crops = num_crops
        self.image_mean, self.image_std = list(image_mean or _MEAN), list(image_std or _STD)
        self.num_img_tokens = num_img_tokens
        if type(num_crops) is not int or not 1 <= num_crops <= MOST_TILES:
            raise ValueError(f"num_crops={num_crops!r} must be from 1 to {MOST_TILES}")
        for name, given in (("image_mean", self.image_mean), ("image_std", self.image_std)):
            if len(given) != 3 or not all(type(one) in (int, float) and abs(one) < 1e9 for one in given):
                raise ValueError(f"{name}={given!r} must be a number for each of three channels")
        if not all(self.image_std):
            raise ValueError("image_std must not be 0")

    @classmethod
    def from_pretrained(cls, path: Path) -> Phi3VImageProcessor:
        """Of a checkpoint's preprocessor_config.json. What else stands there, the published code does not read."""
        told = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
        names = ("num_crops", "image_mean", "image_std", "num_img_tokens")
        return cls(**{name: told[name] for name in names if name in told})

    def to_dict(self) -> dict[str, Any]:
        return {"image_processor_type": type(self).__name__, **vars(self)}

    def __call__(
        self,
        image: Image.Image,
        *,
        crop_size: int,
        return_tensors: str = "pt",
        num_crops: int | None = None,
        image_mean: float | Sequence[float] | None = None,
        image_std: float | Sequence[float] | None = None,
    ) -> dict[str, torch.Tensor]:
        """pixel_values [1, 1 + crops, 3, crop_size, crop_size] float32, the whole first; image_sizes [1, 2], height and
        width of the picture that was cut."""
        picture = _picture(image, crop_size, num_crops or self.num_crops)
        mean = _by_channel(self.image_mean if image_mean is None else image_mean)
        spread = _by_channel(self.image_std if image_std is None else image_std)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float()
        pixels = pixels.div_(255).sub_(mean).div_(spread)
        whole = functional.interpolate(pixels[None], size=(crop_size, crop_size), mode="bicubic")
        rows, columns = (edge // crop_size for edge in pixels.shape[1:])
        crops = pixels.view(3, rows, crop_size, columns, crop_size).permute(1, 3, 0, 2, 4)
        crops = crops.reshape(-1, 3, crop_size, crop_size)
        sizes = torch.tensor([[rows * crop_size, columns * crop_size]])
        return {"pixel_values": torch.cat((whole, crops))[None], "image_sizes": sizes}


def _by_channel(given: float | Sequence[float]) -> torch.Tensor:
    values = list(given) if isinstance(given, Sequence) else [given]
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def _picture(image: Image.Image, side: int, most: int) -> Image.Image:
    """The image scaled and filled up to crops. A high one lies on its side meanwhile: it is scaled along first."""
    image = image.convert("RGB")
    turned = image.width < image.height
    if turned:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    long, short = _scaled(image.height, image.width, side, most)
    image = image.resize((long, short), Image.Resampling.BILINEAR)
    missing = -short % side
    if missing:
        filled = Image.new("RGB", (long, short + missing), _WHITE)
        filled.paste(image, (0, missing // 2))
        image = filled
    return image.transpose(Image.Transpose.TRANSPOSE) if turned else image
