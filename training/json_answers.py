"""Answers as JSON about the scenes and stories of ``world.py``: conversations to train on, and an exam.

An answer is asked for as JSON, or nobody asks and its shape is given: a served model is held to a schema whatever the
prompt says. Then the model decides only the values, and only these are learned ("given").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dialogues import _allowed, _balanced, _training_scene, _training_story, _typed
from questions import Question, scene_questions, story_questions
from world import Scene, Shape, Story, describe, is_held_out, make_scene, tell

Message = dict[str, Any]
Chat = list[Message]

# Keys that say what the value is, the one that is chosen unasked first; and keys that fit any answer.
KEYS: dict[str, tuple[str, ...]] = {
    "color": ("color", "colour", "shape_color", "color_name", "which_color"),
    "absent": ("color", "colour"),
    "shape": ("shape", "kind", "form", "figure", "shape_name", "type"),
    "count": ("count", "number", "total", "how_many", "amount", "n"),
    "exists": ("exists", "there", "is_there", "found", "present", "yes"),
    "where": ("place", "where", "location", "destination"),
    "found": ("thing", "item", "object", "found"),
    "name": ("name", "called", "first_name"),
    "who": ("who", "actor", "subject"),
}
ANSWERS = ("answer", "response", "result", "output", "value", "final_answer", "reply", "data", "content", "text")
LISTS = ("shapes", "items", "objects", "figures", "things", "list", "scene", *ANSWERS[:4])
SENTENCES = ("description", "sentence", "summary", "reasoning", "explanation", "text", "thought")

_ALL = ("Which shapes are there?", "List the shapes.", "What shapes do you see?", "Name all the shapes.",
        "Which shapes do you see?", "Tell me all shapes.", "What is there?", "Give me the shapes.")  # fmt: skip
_ASK = ("Answer as JSON.", "Answer in JSON.", "As JSON.", "As JSON, please.", "Reply with JSON.", "Use JSON.",
        "Give the answer as JSON.", "JSON only.", "Respond in JSON format.", "Return JSON.",
        "Please answer with a JSON object.", "Output JSON.")  # fmt: skip
_ASK_KEYS = ("Answer as JSON with {}.", "As JSON with the keys {}.", "Use JSON with {}.",
             "Reply with a JSON object of {}.", "Return JSON with the fields {}.", "JSON with {}.")  # fmt: skip
_SCHEMA = ("Answer with JSON that fits this schema:", "Return JSON for this schema:", "Use this JSON schema:",
           "Your answer must be JSON of this schema:", "The answer is JSON:",
           "Write one object of this schema only:")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A question and what to answer: ``plain`` when no key is named, else any of the ``forms``."""

    text: str
    plain: Any
    forms: tuple[Any, ...]


def asked_shapes(scene: Scene, rng: Random) -> Asked:
    """All the shapes of a scene, as objects or as strings."""
    listed = [{"shape": shape.kind, "color": shape.color} for shape in scene.shapes]
    kind, color = rng.choice(KEYS["shape"]), rng.choice(KEYS["color"][:3])
    pairs = [(kind, "kind"), (color, "color")]
    rng.shuffle(pairs)
    objects = [{key: getattr(shape, part) for key, part in pairs} for shape in scene.shapes]
    words = [str(shape) for shape in scene.shapes]
    forms = (
        {"shapes": listed},
        {rng.choice(LISTS): objects},
        {rng.choice(LISTS): objects},
        objects,
        {rng.choice(LISTS): words},
        words,
        {"count": len(words), "shapes": listed},
        {"colors": [shape.color for shape in scene.shapes], "shapes": [shape.kind for shape in scene.shapes]},
        {rng.choice(SENTENCES): describe(scene), "shapes": listed},
        *((objects[0],) if len(objects) == 1 else ()),
    )
    return Asked(rng.choice(_ALL), {"shapes": listed}, forms)


def asked_question(question: Question, about: Scene | Story, rng: Random) -> Asked:
    """One of the world's own questions; the value's key says what it is, or is one that fits any answer."""
    scene = about if isinstance(about, Scene) else about.scene
    value, words = _value(question)
    keys = KEYS[_kind(question)]
    forms: list[Any] = [{rng.choice(keys): value}, {rng.choice(ANSWERS): value}, {rng.choice(ANSWERS): words}]
    meant = [s for s in scene.shapes if question.answer in (s.kind, s.color) and question.kind in ("color", "shape")]
    meant = [s for s in meant if s.kind in question.key or s.color in question.key]
    if meant:
        shape: Shape = meant[0]
        pairs = [(rng.choice(KEYS["shape"]), shape.kind), (rng.choice(KEYS["color"][:3]), shape.color)]
        rng.shuffle(pairs)
        forms += [dict(pairs), dict(pairs)]
    if rng.random() < 0.3:
        forms.append({rng.choice(SENTENCES[:4]): describe(scene), rng.choice(ANSWERS): words})
    if rng.random() < 0.15:
        forms.append({rng.choice(ANSWERS): words, rng.choice(("confidence", "score")): 1.0})
    return Asked(question.text, {keys[0]: value}, tuple(forms))


def _kind(question: Question) -> str:
    known = {"count kind": "count", "absent": "absent"}
    return question.kind if question.kind in KEYS else known.get(question.kind, "who")


def _value(question: Question) -> tuple[Any, str]:
    """The answer as a JSON value, and in words."""
    words = question.answer.removeprefix("the ").removeprefix("an ").removeprefix("a ")
    if question.kind in ("count", "count kind"):
        return ("zero", "one", "two", "three").index(words), words
    if question.kind == "exists":
        return words == "yes", words
    return (None, "none") if question.kind == "absent" else (words, words)


# --------------------------------------------------------------------------------------------
# Conversations
# --------------------------------------------------------------------------------------------


def json_chat(rng: Random) -> Chat:
    """A scene or a story that is told, and questions, most of them answered as JSON."""
    if rng.random() < 0.65:
        scene = _training_scene(rng)
        return shaped_chat(rng, scene, f"{describe(scene, rng)} ")
    story = _training_story(rng)
    return shaped_chat(rng, story, f"{tell(story, rng)} ")


def shaped_chat(rng: Random, about: Scene | Story, told: str, most: int = 5) -> Chat:
    """Questions about it, the first one behind ``told``; a system message may ask for JSON once and for all."""
    chat: Chat = []
    always, given_all = rng.random() < 0.25, rng.random() < 0.3
    every = questions(rng, about, rng.randint(1, most))
    form: Any = None
    if always and rng.random() < 0.5:
        every = every[:1]
        form = rng.choice(every[0][0].forms)
        chat.append({"role": "system", "content": f"{noise(rng)}{ask_keys(form, rng)}"})
    elif always:
        chat.append({"role": "system", "content": f"{noise(rng)}{rng.choice(_ASK)}"})
    elif rng.random() < 0.2:
        chat.append(
            {"role": "system", "content": f"{noise(rng)}{rng.choice(('Be brief.', 'You are a helpful assistant.'))}"}
        )
    for asked, question in every:
        way = rng.random()
        text, given = _typed(asked.text, rng), False
        if question is not None and not always and not given_all and way < 0.15:
            answer = question.answer[0].upper() + question.answer[1:] + "."
        elif always:
            answer = json.dumps(asked.plain if form is None else form)
        elif given_all or way < 0.5:
            form, given = rng.choice(asked.forms), True
            answer = json.dumps(form, separators=(",", ":") if rng.random() < 0.3 else None)
        elif way < 0.72:
            answer, text = json.dumps(asked.plain), with_ask(text, rng.choice(_ASK), rng)
        else:
            form = rng.choice(asked.forms)
            answer, text = json.dumps(form), with_ask(text, ask_keys(form, rng), rng)
        chat.append({"role": "user", "content": told + text})
        chat.append({"role": "assistant", "content": answer, "given": given})
        told = ""
    return chat


def dense_chat(rng: Random) -> Chat:
    """Many questions about one scene or story, in turn answered in words, as JSON, and as JSON that is given."""
    about: Scene | Story = _training_scene(rng) if rng.random() < 0.75 else _training_story(rng)
    told = f"{describe(about, rng) if isinstance(about, Scene) else tell(about, rng)} "
    chat: Chat = []
    for asked, question in questions(rng, about, rng.randint(5, 9)):
        way, text, given = rng.random(), _typed(asked.text, rng), False
        if way < 0.2 and question is not None:
            answer = question.answer[0].upper() + question.answer[1:] + "."
        elif way < 0.55:
            answer, text = json.dumps(asked.plain), with_ask(text, rng.choice(_ASK), rng)
        else:
            form, given = rng.choice(asked.forms[: 3 if question is not None else 6]), True
            answer = json.dumps(form, separators=(",", ":") if rng.random() < 0.3 else None)
        chat.append({"role": "user", "content": told + text})
        chat.append({"role": "assistant", "content": answer, "given": given})
        told = ""
    return chat


def questions(rng: Random, about: Scene | Story, count: int) -> list[tuple[Asked, Question | None]]:
    """Which shapes there are, and some of the questions that are not held out."""
    make = scene_questions if isinstance(about, Scene) else story_questions
    picks = _balanced(_allowed(about, make(about, rng)), rng, count)  # type: ignore[operator]
    asked: list[tuple[Asked, Question | None]] = [(asked_question(pick, about, rng), pick) for pick in picks]
    if isinstance(about, Scene):
        asked.insert(rng.randint(0, len(asked)), (asked_shapes(about, rng), None))
    return asked


def with_ask(text: str, ask: str, rng: Random) -> str:
    return f"{ask} {text}" if rng.random() < 0.15 and "\n" not in ask else f"{text} {ask}"


def ask_keys(form: Any, rng: Random) -> str:
    """Asks for a form: by its keys, by its outline, or by its schema."""
    if isinstance(form, list):
        form = {"": form}
    way = rng.random()
    keys = list(form)
    inner = next((list(v[0]) for v in form.values() if isinstance(v, list) and v and isinstance(v[0], dict)), [])
    if keys == [""] or way < 0.25:
        return f"{rng.choice(_SCHEMA)}\n{json.dumps(schema_of(form.get('', form)), indent=rng.choice((None, None, 2)))}"
    if way < 0.7 or inner:
        outline = {
            k: [dict.fromkeys(inner, "...")] if inner and isinstance(v, list) else "..." for k, v in form.items()
        }
        if inner or way < 0.45:
            return f"{rng.choice(_ASK)[:-1]}: {json.dumps(outline)}"
    quote = rng.choice(("", '"'))
    return rng.choice(_ASK_KEYS).format(" and ".join(f"{quote}{key}{quote}" for key in keys))


def schema_of(form: Any) -> dict[str, Any]:
    """A JSON schema that the value fits."""
    if isinstance(form, dict):
        return {
            "type": "object",
            "properties": {key: schema_of(value) for key, value in form.items()},
            "required": list(form),
        }
    if isinstance(form, list):
        return {"type": "array", "items": schema_of(form[0])}
    if isinstance(form, bool):
        return {"type": "boolean"}
    if isinstance(form, int):
        return {"type": "integer"}
    return {"type": "number"} if isinstance(form, float) else {"type": "string" if form is not None else "null"}


_NOISE = ("You", "must", "always", "the", "user", "with", "a", "tool", "when", "and", "not", "do", "task", "step",
          "use", "if", "only", "given", "to", "of", "your", "best", "answer", "help", "please", "follow", "these",
          "rules", "-", "call", "output", "is", "be", "in", "for", "model", "assistant", "agent", "python",
          "object")  # fmt: skip


def noise(rng: Random, chance: float = 0.25) -> str:
    """Now and then, instructions of many words that mean nothing here."""
    if rng.random() > chance:
        return ""
    lines = [" ".join(rng.choices(_NOISE, k=rng.randint(3, 10))) for _ in range(rng.choice((1, 2, 3, 5)))]
    return "".join(line[0].upper() + line[1:] + ".\n" for line in lines)


# --------------------------------------------------------------------------------------------
# The exam
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonItem:
    """A held-out question to answer as JSON: ``begun`` is what a schema forces at the start of the answer."""

    kind: str
    chat: Chat
    begun: str
    expected: Any


EXAM_ASKS = ("Answer as JSON.", "As JSON.", "JSON, please.", "I need JSON.", "Format the answer as JSON.")


def json_exam(rng: Random, size: int) -> list[JsonItem]:
    """Shapes and single questions in turn, asked for in words or forced by what the answer begins with."""
    kinds = ("shapes", "shapes, forced", "question", "question, forced")
    items: list[JsonItem] = []
    while len(items) < size:
        kind, scene = kinds[len(items) % len(kinds)], make_scene(rng)
        if kind.startswith("shapes"):
            if not is_held_out(scene):
                continue
            asked = asked_shapes(scene, rng)
        else:
            picks = [q for q in scene_questions(scene, rng) if is_held_out(scene, q)]
            if not (picks := _balanced(picks, rng, 1)):
                continue
            asked = asked_question(picks[0], scene, rng)
        forced = kind.endswith("forced")
        form = rng.choice([one for one in asked.forms if _follows(one)]) if forced else asked.plain
        begun = _forced(form) if forced else ""
        text = asked.text if forced else f"{asked.text} {rng.choice(EXAM_ASKS)}"
        items.append(JsonItem(kind, [{"role": "user", "content": f"{describe(scene, rng)} {text}"}], begun, form))
    return items


def _follows(form: Any) -> bool:
    """Whether all keys are known from where the first value begins."""
    inner = next(iter(form.values())) if isinstance(form, dict) else form
    objects = isinstance(inner, list) and isinstance(inner[0], dict)
    return (isinstance(form, list) or len(form) == 1) and (not objects or list(inner[0]) == ["shape", "color"])


def _forced(form: Any) -> str:
    """The start of the JSON that a schema of this form leaves no choice about."""
    whole = json.dumps(form)
    first: Any = form
    while isinstance(first, (dict, list)):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    value = json.dumps(first)
    start = whole.index(value, whole.index(":") if isinstance(form, dict) else 0)
    return whole[: start + 1] if isinstance(first, str) else whole[:start].rstrip(" ")


def parsed(text: str) -> Any:
    """The JSON value at the start of the text, or the text itself when it is none."""
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except ValueError:
        return text


def values(chat: Sequence[Message]) -> list[Any]:
    """What a conversation answers, each answer that is JSON parsed."""
    return [parsed(message["content"]) for message in chat if message["role"] == "assistant"]
