"""A small world of coloured shapes: scenes, their descriptions and stories.

Everything here is plain Python driven by a ``random.Random`` that the caller gives, so the same
seed makes the same text on every machine. A scene is kept apart from the words that describe it:
the same scene can be put into a sentence, told as a story, or drawn as a picture, and the same
questions with the same answers apply.

Answers are short canonical strings ("red", "the blue star", "two"); ``say`` turns one into the
sentence that the model speaks ("Red.", "The blue star.", "Two.").

The held-out split is decided by a hash alone (``is_held_out``), never by a list or a seed: whole
scenes, whole stories and single questions about the others are held out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from questions import Question

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "black": (20, 20, 20),
    "gray": (140, 140, 140),
}
KINDS: tuple[str, ...] = ("circle", "square", "triangle", "star")
NUMBERS: tuple[str, ...] = ("zero", "one", "two", "three")
MAX_SHAPES = 3

NAMES = ("Pip", "Mo", "Lulu", "Zed", "Nina", "Otto", "Tam", "Bo", "Kiki", "Rex", "Ada", "Finn")
PLACES = (
    "hill", "river", "forest", "beach", "market", "garden",
    "bridge", "castle", "cave", "tower", "lake", "farm",
)  # fmt: skip
THINGS = (
    "key", "ball", "bell", "book", "hat", "lamp", "map", "coin", "drum", "kite", "cup", "flower",
)  # fmt: skip
ACTIONS = ("danced", "sang", "slept", "laughed", "jumped", "waved", "cried", "whistled")

# The one-word answers in French, for adapters that answer in another voice.
FRENCH: dict[str, str] = {
    "red": "rouge", "green": "vert", "blue": "bleu", "yellow": "jaune", "purple": "violet",
    "orange": "orange", "black": "noir", "gray": "gris", "circle": "cercle", "square": "carré",
    "triangle": "triangle", "star": "étoile", "zero": "zéro", "one": "un", "two": "deux",
    "three": "trois", "yes": "oui", "no": "non",
}  # fmt: skip

# One in this many scenes, stories and questions is never trained on.
HOLD_OUT_ONE_IN = 10


# --------------------------------------------------------------------------------------------
# Scenes
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Shape:
    """One coloured shape, such as the red circle."""

    kind: str
    color: str

    def __str__(self) -> str:
        return f"{self.color} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """One to three different shapes, in the order in which they are mentioned."""

    shapes: tuple[Shape, ...]

    @property
    def key(self) -> str:
        """The scene's identity: the same for any order of the same shapes."""
        return "+".join(sorted(str(shape) for shape in self.shapes))

    def of_kind(self, kind: str) -> list[Shape]:
        """The shapes of this kind."""
        return [shape for shape in self.shapes if shape.kind == kind]

    def of_color(self, color: str) -> list[Shape]:
        """The shapes of this colour."""
        return [shape for shape in self.shapes if shape.color == color]


def make_scene(rng: Random, size: int | None = None) -> Scene:
    """A random scene of ``size`` different shapes (1 to 3 when not given)."""
    size = size or rng.choices((1, 2, 3), weights=(1, 3, 4))[0]
    every = [Shape(kind, color) for kind in KINDS for color in COLORS]
    return Scene(tuple(rng.sample(every, size)))


# --------------------------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------------------------


def a(noun: object) -> str:
    """The noun with its indefinite article: "a red circle", "an orange star"."""
    text = str(noun)
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def say(answer: str) -> str:
    """A canonical answer as the sentence to speak: "red" -> "Red."."""
    return answer[0].upper() + answer[1:] + "."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _listed(rng: Random, parts: list[str]) -> str:
    """ "a, b and c", with or without the comma before "and"."""
    if len(parts) < 2:
        return parts[0]
    comma = "," if len(parts) > 2 and rng.random() < 0.5 else ""
    return ", ".join(parts[:-1]) + f"{comma} and {parts[-1]}"


def describe(scene: Scene, rng: Random | None = None) -> str:
    """One sentence that names every shape of the scene; without ``rng``, the standard one."""
    chooser = rng or Random(0)
    parts = [a(shape) for shape in scene.shapes]
    if rng is None:
        joined = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
        return f"There is {joined}."
    shapes = _listed(chooser, parts)
    be = "is" if len(parts) == 1 else "are"
    templates = [
        f"There is {shapes}.",
        f"There {be} {shapes}.",
        f"There {be} {shapes} in the scene.",
        f"I see {shapes}.",
        f"I can see {shapes}.",
        f"The picture shows {shapes}.",
        f"Here {be} {shapes}.",
        f"Look, {shapes}!",
        f"{_sentence(shapes)} {be} on the table.",
        f"The scene has {shapes}.",
        f"Shapes: {', '.join(map(str, scene.shapes))}.",
        f"In the box there {be} {shapes}.",
        " ".join(f"There is {part}." for part in parts),
    ]
    if len(parts) == 2:
        templates.append(f"{_sentence(parts[0])} is next to {parts[1]}.")
    return chooser.choice(templates)


# --------------------------------------------------------------------------------------------
# Stories
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One thing that happens: shape number ``actor`` does ``verb`` to ``what``.

    ``verb`` is "go" (to a place), "find" (a thing), "do" (an action) or "meet" (the shape whose
    number is ``other``).
    """

    actor: int
    verb: str
    what: str = ""
    other: int = -1

    def __str__(self) -> str:
        return f"{self.actor} {self.verb} {self.what}{self.other}"


@dataclass(frozen=True)
class Story:
    """What happens to the shapes of a scene, before any words are chosen.

    ``names`` gives each shape's name, or "" for a shape without one.
    """

    scene: Scene
    names: tuple[str, ...]
    events: tuple[Event, ...]

    @property
    def key(self) -> str:
        """The story's identity: its shapes, names and events, whatever words tell it."""
        cast = ",".join(f"{s}={n}" for s, n in zip(self.scene.shapes, self.names, strict=True))
        return f"{cast}:{';'.join(map(str, self.events))}"


def make_cast(rng: Random) -> Scene:
    """A scene for a story: no two shapes share a kind or a colour, so each word means one of them."""
    while True:
        scene = make_scene(rng)
        if len({s.kind for s in scene.shapes}) == len({s.color for s in scene.shapes}) == len(scene.shapes):
            return scene


def make_story(rng: Random, scene: Scene, busy: bool = False) -> Story:
    """A random story about the scene's shapes; the first shape is the hero, and may have a name.

    In a busy one more happens than usual, so that whoever asks must ask for the right shape.
    """
    size = len(scene.shapes)
    hero = rng.choice(NAMES) if rng.random() < 0.5 else ""
    return Story(scene, (hero, *[""] * (size - 1)), tuple(_make_events(rng, size, busy)))


def _make_events(rng: Random, size: int, busy: bool) -> list[Event]:
    """The hero sets out, meets the others, and one to three small things happen, or more in a busy story."""
    places, things = rng.sample(PLACES, size), rng.sample(THINGS, size)
    actions = rng.sample(ACTIONS, size)
    meetings = [Event(0, "meet", other=1)] if size > 1 else []
    if size > 2:
        meetings.append(Event(rng.choice((0, 1)), "meet", other=2))
    # One of each kind per shape at most, so that every question has one answer.
    extras = [Event(i, "go", places[i]) for i in range(1, size)]
    extras += [Event(i, "find", things[i]) for i in range(size)]
    extras += [Event(i, "do", actions[i]) for i in range(size)]
    chosen = rng.sample(extras, min(len(extras), rng.randint(3, 6) if busy else rng.choice((1, 2, 2, 3))))
    start = [Event(0, "go", places[0])] if rng.random() < 0.85 else []
    middle = meetings + chosen
    if rng.random() < 0.5:
        rng.shuffle(middle)
    return start + middle


_OPENINGS = (
    "Once upon a time there was {cast}.",
    "Once upon a time there was {cast}.",
    "Once upon a time, {cast} lived in a quiet land.",
    "Once upon a time, {cast} woke up early.",
    "There once was {cast}.",
    "Long ago there was {cast}.",
    "One sunny day, {cast} woke up.",
    "This is a story about {cast}.",
)
_LINKS = ("", "", "", "Then ", "After that, ", "Soon ", "Later, ")
_FIRST_LINKS = ("", "One day, ", "In the morning, ", "One day, ")
_MOVES = {"circle": "rolled", "square": "slid", "triangle": "hopped", "star": "flew"}
_ENDINGS_ONE = ("It was very happy.", "It was a good day.", "The end.", "Then it went home.")
_ENDINGS_MANY = ("They were all happy.", "It was a good day.", "The end.", "They became friends.")


def tell(story: Story, rng: Random) -> str:
    """The story in words: an opening, one sentence for each event, and an ending."""
    return _Teller(story, rng).tell()


class _Teller:
    """Puts one story into words, remembering who has been introduced."""

    def __init__(self, story: Story, rng: Random) -> None:
        self.story, self.rng = story, rng
        self.known: set[int] = set()

    def tell(self) -> str:
        size = len(self.story.names)
        sentences = [self._opening(self._opening_cast())]
        for number, event in enumerate(self.story.events):
            links = _FIRST_LINKS if number == 0 else _LINKS
            sentences.append(_sentence(self.rng.choice(links) + self._event(event)))
        sentences.append(self.rng.choice(_ENDINGS_ONE if size == 1 else _ENDINGS_MANY))
        return " ".join(sentences)

    def _opening_cast(self) -> list[int]:
        """Everybody, or the hero alone when the events introduce all the others."""
        everybody = list(range(len(self.story.names)))
        seen = {0} | {i for e in self.story.events for i in (e.actor, e.other) if i >= 0}
        return [0] if seen == set(everybody) and self.rng.random() < 0.5 else everybody

    def _opening(self, cast: list[int]) -> str:
        shapes = _listed(self.rng, [self._mention(i) for i in cast])
        return self.rng.choice(_OPENINGS).format(cast=shapes)

    def _mention(self, i: int) -> str:
        """ "a red circle named Pip" at first, "the red circle" later."""
        shape, name = self.story.scene.shapes[i], self.story.names[i]
        if i not in self.known:
            self.known.add(i)
            return f"{a(shape)} named {name}" if name else a(shape)
        return f"the {shape}"

    def _event(self, event: Event) -> str:
        return f"{self._mention(event.actor)} {self._predicate(event)}."

    def _predicate(self, event: Event) -> str:
        choice = self.rng.choice
        if event.verb == "go":
            move = _MOVES[self.story.scene.shapes[event.actor].kind]
            return f"{choice((move, move, 'went', 'walked', 'ran'))} to the {event.what}"
        if event.verb == "find":
            where = choice(("", "", " under a tree", " in the grass", " behind a rock"))
            return f"{choice(('found', 'found', 'picked up'))} {a(event.what)}{where}"
        if event.verb == "do":
            return event.what + choice(("", "", " for a while", " all day", " a little"))
        # After a meeting "it" could be either shape, so nobody is the subject.
        self.subject = -1
        other = self._mention(event.other)
        return choice((f"met {other}", f"met {other}", f"met {other} on the way"))


# --------------------------------------------------------------------------------------------
# The held-out split
# --------------------------------------------------------------------------------------------


def is_held_out(about: Scene | Story, question: Question | None = None) -> bool:
    """Whether this scene or story, or else this question about it, is kept out of training.

    A story is also held out when its scene is, and a question counts whatever its wording, so a
    held-out question's answer has never been trained in other words either.
    """
    if isinstance(about, Story):
        if is_held_out(about.scene) or _chosen(f"story|{about.key}"):
            return True
    elif _chosen(f"scene|{about.key}"):
        return True
    return question is not None and _chosen(f"question|{about.key}|{question.key}")


def _chosen(text: str) -> bool:
    """True for one text in ``HOLD_OUT_ONE_IN``, the same ones on every machine."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HOLD_OUT_ONE_IN == 0
