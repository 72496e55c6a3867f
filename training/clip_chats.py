"""What is asked and said about the clips of ``clips.py``: conversations to train on, and an exam."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from clips import CHANGES, Clip, make_clip, towards, training_clip
from dialogues import Conversation, _balanced, _exchange, _opening, _typed
from questions import Asked, Question, _worded, _yes
from world import COLORS, KINDS, NUMBERS, Shape, describe, say

VIDEO = "<|video|>"  # stands for the clip in a message
_WHAT = ("What changed?", "What changed?", "What happened?", "What changed in the clip?", "What changed in the video?",
         "What happens in the clip?", "What happens in the video?", "What is different at the end?",
         "What has changed?", "Describe the change.", "Say what changed.", "What is the change?")  # fmt: skip
_WHICH = {
    "moved": ("What moved?", "Which shape moved?"),
    "turned": ("Which shape changed color?", "Which shape changed its color?", "What changed color?"),
    "appeared": ("What appeared?", "Which shape appeared?"),
    "disappeared": ("What disappeared?", "Which shape disappeared?"),
}
_BARE = {"moved": "move", "appeared": "appear", "disappeared": "disappear"}


def clip_chat(rng: Random) -> tuple[Clip, Conversation]:
    """A clip and questions about it, among them what changed."""
    clip, chat = training_clip(rng), _opening(rng)
    asked = _balanced(clip_questions(clip, rng), rng, rng.randint(1, 5))
    what = _what(clip, rng)
    asked.insert(0 if rng.random() < 0.6 else rng.randint(0, len(asked)), what)
    for number, question in enumerate(asked):
        text = _typed(question.text, rng)
        if number == 0:
            text = f"{text}{VIDEO}" if rng.random() < 0.1 else f"{VIDEO}{text}"
        _exchange(chat, text, answer_of(question))
    return clip, chat


def answer_of(question: Question) -> str:
    """As it is spoken."""
    return question.answer if question.answer.endswith(".") else say(question.answer)


def _what(clip: Clip, rng: Random) -> Question:
    return Question("what changed", "what changed", rng.choice(_WHAT), clip.change.told)


def clip_questions(clip: Clip, rng: Random) -> list[Question]:
    """Every other question that the clip answers in one way, each in one random wording."""
    return _worded(rng, (asked for make in (_which, _how, _whether, _ends) for asked in make(clip, rng)))


def _which(clip: Clip, rng: Random) -> Iterator[Asked]:
    for kind, wordings in _WHICH.items():
        told = clip.change.told.split(f" {kind}")[0]
        yield "which", f"which {kind}", wordings, f"{told}." if clip.change.kind == kind else "nothing"


def _how(clip: Clip, rng: Random) -> Iterator[Asked]:
    change = clip.change
    if change.kind == "moved":
        wordings = (f"Where did the {change.shape} move?", f"Which way did the {change.shape} move?",
                    f"In which direction did the {change.shape} move?")  # fmt: skip
        yield "where", "where", wordings, towards(change.what)
    if change.kind == "turned" and change.shape is not None:
        wordings = (f"What color did the {change.shape.kind} turn?", f"Which color did the {change.shape} turn?",
                    f"What color is the {change.shape} at the end?")  # fmt: skip
        yield "turned", "turned", wordings, change.what


def _whether(clip: Clip, rng: Random) -> Iterator[Asked]:
    change = clip.change
    wordings = ("Did anything change?", "Did something change?", "Has anything changed?", "Is there a change?")
    yield "whether", "any", wordings, _yes(change.kind != "nothing")
    shapes = {*clip.before.shapes, *clip.after.shapes, Shape(rng.choice(KINDS), rng.choice(sorted(COLORS)))}
    for shape in sorted(shapes):
        for kind, verb in _BARE.items():
            fact = change.kind == kind and change.shape == shape
            yield "whether", f"{shape} {kind}", (f"Did the {shape} {verb}?",), _yes(fact)


def _ends(clip: Clip, rng: Random) -> Iterator[Asked]:
    for when, frame, scene in (("start", "first", clip.before), ("end", "last", clip.after)):
        if scene.shapes:
            wordings = (f"Describe the {frame} frame.", f"What do you see at the {when}?",
                        f"What does the {frame} frame show?")  # fmt: skip
            yield "frame", f"describe {when}", wordings, describe(scene)
        wordings = (f"How many shapes are there at the {when}?", f"How many shapes are in the {frame} frame?")
        yield "count", f"count {when}", wordings, NUMBERS[len(scene.shapes)]


@dataclass(frozen=True)
class ClipItem:
    """A question about a clip that nobody has seen, ready to ask."""

    clip: Clip
    question: Question

    @property
    def expected(self) -> str:
        """The one right answer, as spoken."""
        return answer_of(self.question)


def clip_exam(rng: Random, size: int) -> list[ClipItem]:
    """``size`` questions about as many fresh clips: two in three ask what changed, and of every second of these the
    change, or the scene before it, is one that training never has. The kinds of change take turns."""
    items: list[ClipItem] = []
    while len(items) < size:
        number = len(items)
        kind = CHANGES[number % len(CHANGES)]
        clip = make_clip(rng, kind)
        if number % 2 and not clip.held_out:
            continue
        question = _what(clip, rng)
        if number % 3 == 2:
            question = _balanced(clip_questions(clip, rng), rng, 1)[0]
        items.append(ClipItem(clip, question))
    return items
