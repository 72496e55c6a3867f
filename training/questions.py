"""Questions about the scenes and stories of ``world.py``, each with its only right answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from world import COLORS, KINDS, NUMBERS, Scene, Shape, Story, a


@dataclass(frozen=True)
class Question:
    """A question about a scene or a story, with its only right answer.

    ``kind`` groups questions for scoring, ``key`` says what is asked whatever the words,
    ``answer`` is canonical; ``say(answer)`` is what the model should answer.
    """

    kind: str
    key: str
    text: str
    answer: str


Wordings = tuple[str, ...]
Asked = tuple[str, str, Wordings, str]  # kind, key, possible wordings, answer


def scene_questions(scene: Scene, rng: Random) -> list[Question]:
    """Every question that the scene answers in one way, each in one random wording."""
    makers = (_color, _shape, _count, _exists, _absent)
    return _worded(rng, (asked for make in makers for asked in make(scene)))


def story_questions(story: Story, rng: Random) -> list[Question]:
    """Every question that the story answers in one way, each in one random wording."""
    makers: tuple[Callable[[Story, Random], Iterator[Asked]], ...]
    makers = (_where, _met, _found, _did, _named, _cast)
    return _worded(rng, (asked for make in makers for asked in make(story, rng)))


def _worded(rng: Random, asked: Iterator[Asked]) -> list[Question]:
    return [Question(kind, key, rng.choice(wordings), answer) for kind, key, wordings, answer in asked]


def _color(scene: Scene) -> Iterator[Asked]:
    for kind in KINDS:
        if len(found := scene.of_kind(kind)) == 1:
            yield "color", f"color {kind}", _color_wordings(kind), found[0].color


def _color_wordings(kind: str) -> Wordings:
    asked = f"What color is the {kind}?"
    return (asked, asked, f"Which color is the {kind}?", f"What colour is the {kind}?",
            f"What is the color of the {kind}?", f"Tell me the color of the {kind}.")  # fmt: skip


def _shape(scene: Scene) -> Iterator[Asked]:
    for color in COLORS:
        if len(found := scene.of_color(color)) == 1:
            wordings = (f"What shape is {color}?", f"Which shape is {color}?",
                        f"What shape is the {color} one?", f"What is {color}?")  # fmt: skip
            yield "shape", f"shape {color}", wordings, found[0].kind


def _count(scene: Scene) -> Iterator[Asked]:
    total = NUMBERS[len(scene.shapes)]
    wordings = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
    yield "count", "count shapes", wordings, total
    for kind in KINDS:
        number = NUMBERS[len(scene.of_kind(kind))]
        wordings = (f"How many {kind}s are there?", f"How many {kind}s do you see?")
        yield "count kind", f"count {kind}", wordings, number
    for color in COLORS:
        if number := len(scene.of_color(color)):
            asked = (f"How many {color} shapes are there?", f"How many shapes are {color}?")
            yield "count", f"count {color}", asked, NUMBERS[number]


def _exists(scene: Scene) -> Iterator[Asked]:
    """Is it there? Most wrong guesses mix a kind and a colour that the scene does have."""
    for kind in KINDS:
        answer = _yes(bool(scene.of_kind(kind)))
        yield "exists", f"exists {kind}", (f"Is there a {kind}?", f"Do you see a {kind}?"), answer
        for color in COLORS:
            if scene.of_kind(kind) or scene.of_color(color):
                shape = Shape(kind, color)
                answer = _yes(shape in scene.shapes)
                asked = (f"Is there {a(shape)}?", f"Do you see {a(shape)}?")
                yield "exists", f"exists {shape}", asked, answer
            if len(found := scene.of_kind(kind)) == 1:
                answer = _yes(found[0].color == color)
                yield "exists", f"is {kind} {color}", (f"Is the {kind} {color}?",), answer


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _absent(scene: Scene) -> Iterator[Asked]:
    """Asking the colour of a shape that is not there gets told so."""
    for kind in KINDS:
        if not scene.of_kind(kind):
            yield "absent", f"color {kind}", _color_wordings(kind), f"there is no {kind}"


def _where(story: Story, rng: Random) -> Iterator[Asked]:
    for event in story.events:
        if event.verb == "go":
            shape, who = story.scene.shapes[event.actor], _reference(story, event.actor, rng)
            wordings = (f"Where did {who} go?", f"Where did {who} go to?")
            yield "where", f"where {shape}", wordings, f"the {event.what}"
            asked = (f"Who went to the {event.what}?", f"Which shape went to the {event.what}?")
            yield "who went", f"who went {event.what}", asked, f"the {shape}"


def _met(story: Story, rng: Random) -> Iterator[Asked]:
    """Meeting goes both ways; only a shape that was in one meeting is asked about."""
    pairs = [(e.actor, e.other) for e in story.events if e.verb == "meet"]
    for i, shape in enumerate(story.scene.shapes):
        partners = [b if i == a_ else a_ for a_, b in pairs if i in (a_, b)]
        if len(partners) == 1:
            who = _reference(story, i, rng)
            wordings = (f"Who met {who}?", f"Who did {who} meet?", f"Which shape met {who}?")
            yield "met", f"met {shape}", wordings, f"the {story.scene.shapes[partners[0]]}"


def _found(story: Story, rng: Random) -> Iterator[Asked]:
    for event in story.events:
        if event.verb == "find":
            shape, who = story.scene.shapes[event.actor], _reference(story, event.actor, rng)
            yield "found", f"found {shape}", (f"What did {who} find?",), a(event.what)
            wordings = (f"Who found the {event.what}?", f"Who found {a(event.what)}?")
            yield "who found", f"who found {event.what}", wordings, f"the {shape}"


def _did(story: Story, rng: Random) -> Iterator[Asked]:
    for event in story.events:
        if event.verb == "do":
            wordings = (f"Who {event.what}?", f"Which shape {event.what}?")
            yield "did", f"did {event.what}", wordings, f"the {story.scene.shapes[event.actor]}"


def _named(story: Story, rng: Random) -> Iterator[Asked]:
    for shape, name in zip(story.scene.shapes, story.names, strict=True):
        if name:
            wordings = (f"What is the name of the {shape}?", f"What is the {shape} called?")
            yield "name", f"name {shape}", wordings, name
            yield "who is", f"who is {name}", (f"Who is {name}?",), f"the {shape}"


def _cast(story: Story, rng: Random) -> Iterator[Asked]:
    """What the scene alone answers, asked about the story."""
    yield from _color(story.scene)
    wordings = ("How many shapes are in the story?", "How many shapes are there?")
    yield "count", "count shapes", wordings, NUMBERS[len(story.scene.shapes)]


def _reference(story: Story, i: int, rng: Random) -> str:
    """Words that mean this shape and no other: "the red circle" or "the circle"."""
    shape = story.scene.shapes[i]
    return rng.choice((f"the {shape}", f"the {shape.kind}"))
