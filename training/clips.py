"""Short clips of the scenes of ``world.py``: a few frames, in which at most one thing changes.

A shape moves (at once or little by little), turns another colour, appears or disappears, somewhere between the first
frame and the last; or nothing changes. Like a picture, a clip follows from the ``random.Random``
that the caller gives.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from pictures import ASPECTS, GAP, RADII, SIDES, Placed, _apart, _background, _draw
from PIL import Image, ImageDraw
from world import COLORS, KINDS, Scene, Shape, _chosen, a, is_held_out, make_scene

CHANGES = ("moved", "turned", "appeared", "disappeared", "nothing")
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
FRAMES = (2, 3, 4, 5, 6)
_FRAME_WEIGHTS = (34, 26, 30, 5, 5)
LEAST_MOVE = 0.3  # of the picture's side


@dataclass(frozen=True)
class Change:
    """What happens in a clip. what: a direction, or the new colour, or nothing."""

    kind: str
    shape: Shape | None = None
    what: str = ""

    @property
    def key(self) -> str:
        """The change's identity, whatever else is there."""
        return f"{self.kind} {self.shape} {self.what}"

    @property
    def told(self) -> str:
        """The one right answer to what has changed."""
        if self.kind == "nothing":
            return "Nothing changed."
        if self.kind == "appeared":
            new = a(self.shape)
            return f"{new[0].upper()}{new[1:]} appeared."
        detail = {"moved": f" {towards(self.what)}", "turned": f" {self.what}"}.get(self.kind, "")
        return f"The {self.shape} {self.kind}{detail}."


@dataclass(frozen=True)
class Clip:
    """Frames, and what changes; ``before`` and ``after`` have the shapes of the first and the last, from the left."""

    frames: tuple[Image.Image, ...]
    change: Change
    before: Scene
    after: Scene

    @property
    def held_out(self) -> bool:
        """Whether training never has this change, or what is there before it."""
        return is_held_out(self.before) or _chosen(f"change|{self.change.key}")


def towards(direction: str) -> str:
    """ "right" -> "to the right"; "up" stays."""
    return f"to the {direction}" if direction in ("right", "left") else direction


def make_clip(rng: Random, kind: str | None = None) -> Clip:
    """A clip of this kind of change, or of any."""
    kind = kind or rng.choice(CHANGES)
    while True:
        height = rng.randint(*SIDES)
        width = min(SIDES[1], max(SIDES[0], round(height * rng.uniform(*ASPECTS))))
        scene = make_scene(rng)
        change = _make_change(rng, scene, kind)
        tracks = None if change is None else _place(rng, scene, change, width, height)
        if change is not None and tracks is not None:
            break
    count = rng.choices(FRAMES, weights=_FRAME_WEIGHTS)[0]
    shares = _shares(rng, count, change.kind == "moved")
    frames = _drawn(rng, tracks, shares, (width, height))
    ends = [_scene([track[0] for track in tracks]), _scene([track[1] for track in tracks])]
    return Clip(tuple(_filmed(rng, frames)), change, *ends)


def training_clip(rng: Random) -> Clip:
    """A clip that is not held out."""
    while (clip := make_clip(rng)).held_out:
        pass
    return clip


def _make_change(rng: Random, scene: Scene, kind: str) -> Change | None:
    """Of one of the scene's shapes, or of a further one that appears; None where the scene has no room for one."""
    shape = rng.choice(scene.shapes)
    if kind == "nothing":
        return Change(kind)
    if kind == "moved":
        return Change(kind, shape, rng.choice(sorted(DIRECTIONS)))
    if kind == "turned":
        others = [color for color in COLORS if Shape(shape.kind, color) not in scene.shapes]
        return Change(kind, shape, rng.choice(others))
    if kind == "appeared":
        new = Shape(rng.choice(KINDS), rng.choice(sorted(COLORS)))
        return None if new in scene.shapes or len(scene.shapes) > 2 else Change(kind, new)
    return Change(kind, shape)


Track = tuple[Placed | None, Placed | None]  # a shape in the first frame, and in the last; None: it is not there


def _place(rng: Random, scene: Scene, change: Change, width: int, height: int) -> list[Track] | None:
    """Where shapes are at the start and at the end; they are whole and apart, also on the way. None: no luck."""
    side = min(width, height)
    shapes = [*scene.shapes, change.shape] if change.kind == "appeared" else list(scene.shapes)
    most = RADII[1]
    for _ in range(60):
        tracks = [_track(rng, shape, change, most, width, height) for shape in shapes]
        if None not in tracks and all(
            _apart(one, other, GAP * side)
            for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
            for number, first in enumerate(tracks)
            for second in tracks[:number]
            if first is not None and second is not None
            for one, other in [(_between(first, share), _between(second, share))]
            if one is not None and other is not None
        ):
            return [track for track in tracks if track is not None]
        most = max(RADII[0], most * 0.96)
    return None


def _track(rng: Random, shape: Shape, change: Change, most: float, width: int, height: int) -> Track | None:
    side = min(width, height)
    radius = side * rng.uniform(RADII[0], most)
    start = Placed(shape, rng.uniform(radius, width - radius), rng.uniform(radius, height - radius), radius)
    if shape != change.shape:
        return start, start
    if change.kind == "moved":
        right, down = DIRECTIONS[change.what]
        along = width if right else height
        way, drift = along * rng.uniform(LEAST_MOVE, 0.75), rng.uniform(-0.2, 0.2)
        x = start.x + way * (right or drift)
        y = start.y + way * (down or drift)
        inside = radius <= x <= width - radius and radius <= y <= height - radius
        return (start, replace(start, x=x, y=y)) if inside else None
    ends: dict[str, Track] = {
        "turned": (start, replace(start, shape=Shape(shape.kind, change.what))),
        "appeared": (None, start),
        "disappeared": (start, None),
    }
    return ends[change.kind]


def _between(track: Track, share: float) -> Placed | None:
    """A shape when so much of the change is done."""
    first, last = track
    if first is None or last is None or first.shape != last.shape:
        return first if share < 0.5 else last
    x, y, radius = (
        one + share * (other - one)
        for one, other in ((first.x, last.x), (first.y, last.y), (first.radius, last.radius))
    )
    return Placed(first.shape, x, y, radius)


def _shares(rng: Random, count: int, gradual: bool) -> list[float]:
    """Of each frame, how much of the change is done: none in the first, all in the last."""
    if gradual and rng.random() < 0.7:
        begin, end = (0, count - 1) if rng.random() < 0.5 else sorted(rng.sample(range(count), 2))
    else:
        begin = rng.randrange(count - 1)
        end = begin + 1
    return [min(1.0, max(0.0, (number - begin) / (end - begin))) for number in range(count)]


def _drawn(rng: Random, tracks: list[Track], shares: list[float], size: tuple[int, int]) -> list[Image.Image]:
    width, height = size
    scale = rng.choice((1, 1, 2))
    ground = _background(rng, width * scale, height * scale)
    seeds = [rng.getrandbits(32) for _ in tracks]  # a shape keeps its shade and its turn
    frames: list[Image.Image] = []
    for number, share in enumerate(shares):
        if number and share == shares[number - 1]:
            frames.append(frames[-1])
            continue
        canvas = ground.copy()
        draw = ImageDraw.Draw(canvas)
        for track, seed in zip(tracks, seeds, strict=True):
            if (one := _between(track, share)) is not None:
                _draw(draw, one, Random(seed), scale)
        frames.append(canvas if scale == 1 else canvas.resize(size, Image.Resampling.BOX))
    return frames


def _filmed(rng: Random, frames: list[Image.Image]) -> list[Image.Image]:
    """As they are, or as a camera has them: with grain, or compressed."""
    way = rng.random()
    if way < 0.6:
        return frames
    if way < 0.8:
        quality = rng.randint(45, 95)
        return [_compressed(frame, quality) for frame in frames]
    grain, noise = rng.uniform(1, 5), np.random.default_rng(rng.getrandbits(64))
    return [
        Image.fromarray(
            np.clip(np.asarray(frame) + noise.normal(0.0, grain, (frame.height, frame.width, 1)), 0, 255).astype(
                np.uint8
            )
        )
        for frame in frames
    ]


def _compressed(frame: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    frame.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def _scene(placed: list[Placed | None]) -> Scene:
    there = sorted((one for one in placed if one is not None), key=lambda one: one.x)
    return Scene(tuple(one.shape for one in there))
