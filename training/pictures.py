"""Pictures of the scenes of ``world.py``, drawn with Pillow, and what is said about them.

A picture shows one to three shapes at any place and size, apart from each other, on a light background. Its scene
names the shapes from left to right. Like everything here, a picture follows from the ``random.Random`` that the
caller gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw
from world import COLORS, Scene, Shape, make_scene

RGB = tuple[int, int, int]
Point = tuple[float, float]

SIDES = (96, 176)  # pixels, least and most
ASPECTS = (0.75, 1.34)  # width to height, least and most
RADII = (0.085, 0.3)  # of the shorter side, least and most
GAP = 0.03  # of the shorter side, between two shapes
SAME_AGAIN = 0.1  # chance that a shape is there twice

# The picture that ships with the model.
DEMO_PICTURE = Path(__file__).resolve().parent.parent / "quire" / "demo" / "picture.png"
DEMO_SCENE = Scene((Shape("circle", "red"), Shape("star", "blue"), Shape("triangle", "yellow")))


@dataclass(frozen=True)
class Placed:
    """A shape in a picture: it lies within the circle of this centre and radius, in pixels."""

    shape: Shape
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Picture:
    """A drawn scene; ``placed`` and ``scene`` have the shapes from left to right."""

    image: Image.Image
    placed: tuple[Placed, ...]

    @property
    def scene(self) -> Scene:
        return Scene(tuple(one.shape for one in self.placed))


def make_picture(rng: Random, scene: Scene | None = None) -> Picture:
    """A picture of the scene, or of a random one, in which a shape may be there twice."""
    if scene is None:
        scene = make_scene(rng)
        if len(scene.shapes) > 1 and rng.random() < SAME_AGAIN:
            scene = Scene((scene.shapes[0], *scene.shapes[:-1]))
    height = rng.randint(*SIDES)
    width = min(SIDES[1], max(SIDES[0], round(height * rng.uniform(*ASPECTS))))
    placed = tuple(sorted(_place(rng, scene, width, height), key=lambda one: one.x))
    scale = rng.choice((1, 1, 2))  # twice the size, then halved, makes smooth edges
    canvas = _background(rng, width * scale, height * scale)
    draw = ImageDraw.Draw(canvas)
    for one in placed:
        _draw(draw, one, rng, scale)
    image = canvas if scale == 1 else canvas.resize((width, height), Image.Resampling.BOX)
    return Picture(image, placed)


def _place(rng: Random, scene: Scene, width: int, height: int) -> list[Placed]:
    """Anywhere, but whole and apart from each other; the more tries it takes, the smaller the shapes."""
    side = min(width, height)
    most = RADII[1]
    while True:
        placed: list[Placed] = []
        for shape in scene.shapes:
            radius = side * rng.uniform(RADII[0], most)
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            placed.append(Placed(shape, x, y, radius))
        if all(_apart(a, b, GAP * side) for i, a in enumerate(placed) for b in placed[:i]):
            return placed
        most = max(RADII[0], most * 0.98)


def _apart(a: Placed, b: Placed, gap: float) -> bool:
    return math.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius + gap


# --------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------


def _light(rng: Random) -> RGB:
    return rng.randint(205, 255), rng.randint(205, 255), rng.randint(205, 255)


def _background(rng: Random, width: int, height: int) -> Image.Image:
    """Plain, shaded from one light colour to another, grainy, or with pale lines."""
    base = np.array(_light(rng), dtype=np.float32)
    way = rng.random()
    if way < 0.35:
        return Image.new("RGB", (width, height), tuple(int(v) for v in base))
    if way < 0.65:
        other = np.array(_light(rng), dtype=np.float32)
        across = np.linspace(0.0, 1.0, width, dtype=np.float32)[None, :, None]
        down = np.linspace(0.0, 1.0, height, dtype=np.float32)[:, None, None]
        share = across if rng.random() < 0.5 else down
        pixels = np.broadcast_to(base + (other - base) * share, (height, width, 3))
    elif way < 0.85:
        noise = np.random.default_rng(rng.getrandbits(64)).normal(0.0, rng.uniform(2, 9), (height, width, 1))
        pixels = base + noise
    else:
        image = Image.new("RGB", (width, height), tuple(int(v) for v in base))
        draw, line = ImageDraw.Draw(image), tuple(int(v * 0.95) for v in base)
        step = rng.randint(8, 24)
        for x in range(rng.randrange(step), width, step):
            draw.line((x, 0, x, height), fill=line)
        return image
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _draw(draw: ImageDraw.ImageDraw, one: Placed, rng: Random, scale: int) -> None:
    x, y, radius = one.x * scale, one.y * scale, one.radius * scale
    fill = tuple(min(255, max(0, value + rng.randint(-14, 14))) for value in COLORS[one.shape.color])
    turn = math.radians(rng.uniform(-20, 20))
    if one.shape.kind == "circle":
        small = radius * 0.88
        draw.ellipse((x - small, y - small, x + small, y + small), fill=fill)
    elif one.shape.kind == "square":
        draw.polygon(_corners(x, y, [radius] * 4, turn + math.pi / 4), fill=fill)
    elif one.shape.kind == "triangle":
        draw.polygon(_corners(x, y, [radius] * 3, turn), fill=fill)
    else:
        draw.polygon(_corners(x, y, [radius, radius * 0.42] * 5, turn), fill=fill)


def _corners(x: float, y: float, radii: list[float], turn: float) -> list[Point]:
    """Points around a centre, evenly spread, the first one at the top when ``turn`` is 0."""
    angles = (turn + 2 * math.pi * i / len(radii) for i in range(len(radii)))
    return [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]


if __name__ == "__main__":
    make_picture(Random("the picture that ships"), DEMO_SCENE).image.save(DEMO_PICTURE)
