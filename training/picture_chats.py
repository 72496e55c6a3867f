"""What is asked and said about the pictures of ``pictures.py``: conversations to train on, and an exam."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dialogues import Conversation, _allowed, _balanced, _exchange, _opening, _typed
from pictures import Picture, make_picture
from questions import Question, scene_questions
from world import describe, is_held_out, say

IMAGE = "<|image|>"  # stands for the picture in a message
KINDS = ("color", "shape", "count", "count kind", "exists", "absent", "describe")
_DESCRIBE = ("Describe the picture.", "What do you see?", "What is in the picture?", "Describe the image.",
             "What does the picture show?")  # fmt: skip


def training_picture(rng: Random) -> Picture:
    """A picture whose scene is not held out."""
    while is_held_out((picture := make_picture(rng)).scene):
        pass
    return picture


def picture_chat(rng: Random) -> tuple[Picture, Conversation]:
    """A picture and questions about it; nearly always, one of them is to describe it."""
    picture = training_picture(rng)
    scene, chat = picture.scene, _opening(rng)
    asked = _balanced(_allowed(scene, scene_questions(scene, rng)), rng, rng.randint(3, 10))
    # The colours, the shapes and their number are what pictures are asked about most.
    asked += [q for q in _allowed(scene, scene_questions(scene, rng)) if q.kind in ("color", "shape")][:2]
    asked += [_description(picture, rng)] * (rng.random() < 0.8)
    rng.shuffle(asked)
    for number, question in enumerate(asked):
        text = _typed(question.text, rng)
        if number == 0:
            text = f"{text}{IMAGE}" if rng.random() < 0.1 else f"{IMAGE}{text}"
        _exchange(chat, text, question.answer if question.kind == "describe" else say(question.answer))
    return picture, chat


def _description(picture: Picture, rng: Random) -> Question:
    return Question("describe", "describe", rng.choice(_DESCRIBE), describe(picture.scene))


@dataclass(frozen=True)
class PictureItem:
    """A question about a picture that nobody has seen, ready to ask."""

    picture: Picture
    question: Question

    @property
    def expected(self) -> str:
        """The one right answer, as spoken."""
        return self.question.answer if self.question.kind == "describe" else say(self.question.answer)


def picture_exam(rng: Random, size: int) -> list[PictureItem]:
    """``size`` questions about as many fresh pictures, the kinds of question in turn."""
    items: list[PictureItem] = []
    while len(items) < size:
        kind = KINDS[len(items) % len(KINDS)]
        picture = make_picture(rng)
        if kind == "describe":
            items.append(PictureItem(picture, _description(picture, rng)))
            continue
        picks = [q for q in scene_questions(picture.scene, rng) if q.kind == kind]
        if kind == "count":  # "How many shapes are there?" and not those of one colour
            picks = [q for q in picks if q.key == "count shapes"]
        items += [PictureItem(picture, question) for question in _balanced(picks, rng, 1)]
    return items
