"""The demo's vision tower: a small CLIP-shaped one, first taught to say of each patch what is there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random

import numpy as np
import torch
from picture_chats import training_picture
from pictures import Picture
from PIL import Image
from stage import Pace, Stage
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CLIPVisionConfig, CLIPVisionModel
from world import COLORS, KINDS

MEAN = STD = 0.5
_COLOR_NUMBER = {name: number for number, name in enumerate(COLORS, 1)}
_KIND_NUMBER = {name: number for number, name in enumerate(KINDS, 1)}


@dataclass(frozen=True)
class VisionConfig:
    """Everything that decides the tower's shape and its first lessons."""

    seed: int = 2026
    pace: Pace = Pace(steps=2400, learning_rate=3e-3, warmup=100)  # noqa: RUF009 (it is frozen)
    pictures: int = 64  # per step
    parts: int = 4  # batches that a step's pictures are split into
    image: int = 96  # pixels a side, however the picture was shaped
    patch: int = 12
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 512

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


def build_tower(eyes: VisionConfig) -> CLIPVisionModel:
    """A tower with random weights that depend on the seed alone."""
    torch.manual_seed(eyes.seed)
    config = CLIPVisionConfig(
        hidden_size=eyes.hidden,
        intermediate_size=eyes.intermediate,
        num_hidden_layers=eyes.layers,
        num_attention_heads=eyes.heads,
        image_size=eyes.image,
        patch_size=eyes.patch,
        hidden_act="gelu",
        projection_dim=eyes.hidden,
    )
    tower = CLIPVisionModel(config)
    for name, parameter in tower.named_parameters():
        if "post_layernorm" in name:  # of the pooled output, which nothing reads
            parameter.requires_grad = False
    tower.set_attn_implementation("sdpa")
    return tower


def pixels(image: Image.Image, eyes: VisionConfig) -> torch.Tensor:
    """[3, image, image] float32: what the image processor that is saved with the model makes of it."""
    small = image.convert("RGB").resize((eyes.image, eyes.image), Image.Resampling.BICUBIC)
    values = np.asarray(small, dtype=np.float32) / 255
    return torch.from_numpy(((values - MEAN) / STD).transpose(2, 0, 1).copy())


class Lessons(nn.Module):
    """The tower and what each patch must tell: kind and colour of its shape, its number from the left, how many."""

    def __init__(self, eyes: VisionConfig, tower: CLIPVisionModel) -> None:
        super().__init__()
        self.tower = tower
        self.sizes = (len(KINDS) + 1, len(COLORS) + 1, 4, 4)
        self.head = nn.Linear(eyes.hidden, sum(self.sizes))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.tower(values, output_hidden_states=True).hidden_states[-1][:, 1:]
        return self.head(features).split(self.sizes, dim=-1)


@dataclass(frozen=True)
class Seen:
    """values: [N, 3, image, image]; truth: [N, patches, 4], what ``Lessons`` must tell of each patch."""

    values: torch.Tensor
    truth: torch.Tensor


def lessons(eyes: VisionConfig) -> tuple[Stage, CLIPVisionModel]:
    """The tower's stage, and the tower that it trains."""
    tower = build_tower(eyes)
    model = Lessons(eyes, tower)

    def batches(step: int) -> list[Seen]:
        rng = Random(f"eyes {eyes.seed} {step}")
        pictures = [training_picture(rng) for _ in range(eyes.pictures)]
        size = eyes.pictures // eyes.parts
        return [_seen(pictures[at : at + size], eyes) for at in range(0, eyes.pictures, size)]

    def loss(seen: Seen) -> torch.Tensor:
        kind = seen.truth[..., 0]
        # Most patches show nothing; those that show a shape count more.
        counts = torch.where(kind > 0, 3.0, 0.5)
        losses = (
            cross_entropy(scores.float().transpose(1, 2), seen.truth[..., place], reduction="none")
            for place, scores in enumerate(model(seen.values))
        )
        return sum((one * counts).sum() for one in losses)

    def weight(seen: Seen) -> float:
        return float(seen.truth[..., 0].numel())

    return Stage("eyes", asdict(eyes), eyes.pace, model, batches, loss, weight), tower


def _seen(pictures: list[Picture], eyes: VisionConfig) -> Seen:
    truth = np.stack([_truth(picture, eyes) for picture in pictures])
    return Seen(torch.stack([pixels(picture.image, eyes) for picture in pictures]), torch.from_numpy(truth))


def _truth(picture: Picture, eyes: VisionConfig) -> np.ndarray:
    """[patches, 4] int64: for each patch, the nearest shape that reaches to its middle, or near it."""
    grid = eyes.image // eyes.patch
    width, height = picture.image.size
    middles = (np.arange(grid) + 0.5) / grid
    x, y = np.tile(middles * width, grid), np.repeat(middles * height, grid)
    truth = np.zeros((grid * grid, 4), dtype=np.int64)
    nearest = np.ones(grid * grid)
    for number, one in enumerate(picture.placed, 1):
        reach = max(one.radius, 0.5 * max(width, height) / grid)
        distance = np.hypot(x - one.x, y - one.y) / reach
        told = (_KIND_NUMBER[one.shape.kind], _COLOR_NUMBER[one.shape.color], number)
        truth[distance < nearest, :3] = told
        nearest = np.minimum(nearest, distance)
    truth[:, 3] = len(picture.placed)
    return truth
