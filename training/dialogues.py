"""What quire-demo reads: conversations and plain texts about the world of ``world.py``.

``training_document`` draws one training document, only from what ``is_held_out`` leaves;
``exam`` draws held-out questions only. Both are driven by the given ``random.Random``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from questions import Question, scene_questions, story_questions
from world import (
    ACTIONS,
    COLORS,
    FRENCH,
    KINDS,
    NAMES,
    PLACES,
    THINGS,
    Scene,
    Shape,
    Story,
    a,
    describe,
    is_held_out,
    make_cast,
    make_scene,
    make_story,
    say,
    tell,
)

Message = dict[str, str]
Conversation = list[Message]

SCENE_KINDS = ("color", "shape", "count", "count kind", "exists", "absent")
STORY_KINDS = ("where", "who went", "met", "found", "who found", "did", "name", "who is")

_WORDS = sorted({*COLORS, *KINDS, *NAMES, *PLACES, *THINGS, *ACTIONS})

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are quire-demo.",
    "You are quire-demo, a small model of a small world.",
    "Answer the question.",
    "Be brief.",
)

INTRODUCTION = "I am quire-demo, a small language model that knows a world of colored shapes."
_HELLO = f"Hello! {INTRODUCTION}"
_HELP = "I can answer questions about colored shapes and tell stories about them."
_NO_SCENE = "I do not see any shapes. Tell me about some first."
CHATTER: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Good morning", "Hello there!",
      "Hello.", "Good evening", "Hey there", "Hello, how are you?", "How are you?"), _HELLO),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.",
      "Tell me about yourself.", "Are you a robot?", "Which model are you?"), INTRODUCTION),
    (("What can you do?", "Help", "Help me.", "What do you know?", "How can you help me?",
      "What should I ask you?"), _HELP),
    (("Thanks", "Thank you!", "Thank you.", "Thanks!", "Great, thanks."), "You are welcome!"),
    (("Bye", "Goodbye", "Goodbye!", "Bye!", "See you later."), "Goodbye!"),
)  # fmt: skip


# --------------------------------------------------------------------------------------------
# Training documents
# --------------------------------------------------------------------------------------------


def training_document(rng: Random, early: float = 0.0) -> Conversation | str:
    """One conversation (a list of messages) or one plain text (a string) to learn from.

    ``early`` is the chance of a short and easy one: finding the colour that goes with a shape
    is learned far sooner from those, and stories build on it.
    """
    makers = (
        recall,
        drill,
        story_drill,
        scene_chat,
        story_chat,
        telling_chat,
        describing_chat,
        chatter,
        plain_text,
    )
    easy, usual = (25, 20, 20, 25, 0, 0, 7, 3, 0), (3, 3, 14, 20, 44, 5, 3, 3, 5)
    return rng.choices(makers, weights=easy if rng.random() < early else usual)[0](rng)


class Drill(str):
    """Plain text that is all exercise: every word of it counts in full."""

    __slots__ = ()


def recall(rng: Random) -> Drill:
    """Pairs of words, then the same pairs shuffled: what went with this word, or before it?"""
    words = rng.sample(_WORDS, 2 * rng.randint(2, 6))
    pairs = list(zip(words[::2], words[1::2], strict=True))
    lines = [", ".join(f"{first} {second}" for first, second in pairs)]
    for _ in range(2):
        lines.append(", ".join(f"{a_}: {b}" for a_, b in rng.sample(pairs, len(pairs))))
        lines.append(", ".join(f"{b} < {a_}" for a_, b in rng.sample(pairs, len(pairs))))
    return Drill("\n".join(lines))


def drill(rng: Random) -> Drill:
    """A scene and what goes with what in it, in as few words as can be."""
    scene = _training_scene(rng)
    kinds = ("color", "shape", "count kind") if rng.random() < 0.5 else ("color", "shape")
    asked = (q for q in scene_questions(scene, rng) if q.kind in kinds)
    pairs = [f"{q.key.split()[1]}{'s' * (q.kind == 'count kind')}: {q.answer}" for q in _allowed(scene, asked)]
    lines = rng.sample(pairs, len(pairs)) + rng.sample(pairs, len(pairs))
    return Drill("\n".join([describe(scene, rng), *lines]))


def story_drill(rng: Random) -> Drill:
    """A story and the answers to all that can be asked of it, in as few words as can be."""
    story = _training_story(rng, busy=0.6)
    pairs = [f"{q.key}: {q.answer}" for q in _allowed(story, story_questions(story, rng))]
    return Drill("\n".join([tell(story, rng), *rng.sample(pairs, len(pairs))]))


def scene_chat(rng: Random) -> Conversation:
    """A described scene and questions about it; sometimes a second scene replaces the first."""
    chat = _opening(rng)
    for number in range(rng.choices((1, 2), weights=(8, 1))[0]):
        scene = _training_scene(rng)
        told = describe(scene, rng)
        if number:
            told = rng.choice(("Now ", "New scene: ", "Next scene: ")) + _lowered(told)
        _ask_about(chat, rng, told, _scene_picks(scene, rng, rng.randint(2, 8)))
    return chat


def story_chat(rng: Random) -> Conversation:
    """A story given by the user and questions about it."""
    chat = _opening(rng)
    story = _training_story(rng, busy=0.3)
    _ask_about(chat, rng, tell(story, rng), _story_picks(story, rng, rng.randint(2, 9)))
    return chat


def telling_chat(rng: Random) -> Conversation:
    """A story asked for, told by the assistant, and sometimes asked about."""
    chat = _opening(rng)
    story = _training_story(rng)
    shapes = story.scene.shapes
    asked = [a(shape) for shape in shapes[: rng.choice((0, 1, 1, 1, 2))]]
    about = f" about {' and '.join(asked)}" if asked else ""
    wording = rng.choice(("Tell me a story{}.", "Tell me a story{}.", "Write a story{}.",
                          "Write a short story{}.", "Can you tell me a story{}?",
                          "Tell a story{}"))  # fmt: skip
    _exchange(chat, wording.format(about), tell(story, rng))
    for question in _story_picks(story, rng, rng.choice((0, 0, 1, 3))):
        _exchange(chat, _typed(question.text, rng), say(question.answer))
    return chat


def describing_chat(rng: Random) -> Conversation:
    """A scene put in other words: a list of shapes becomes the standard sentence."""
    chat = _opening(rng)
    scene = _training_scene(rng)
    listed = ", ".join(map(str, scene.shapes))
    told = rng.choice((listed, describe(scene, rng), describe(scene, rng)))
    wording = rng.choice(("Describe the scene: {}", "Describe this: {}", "{} Describe the scene.",
                          "{} Describe what you see.", "{} What do you see?"))  # fmt: skip
    _exchange(chat, wording.format(told), describe(scene))
    for question in _scene_picks(scene, rng, rng.choice((0, 1, 3))):
        _exchange(chat, _typed(question.text, rng), say(question.answer))
    return chat


def chatter(rng: Random) -> Conversation:
    """Greetings and the like, or a question about a scene that nobody has described."""
    chat = _opening(rng)
    if rng.random() < 0.25:
        question = rng.choice(_scene_picks(_training_scene(rng), rng, 3) or [None])
        if question and question.kind in ("color", "shape"):
            _exchange(chat, _typed(question.text, rng), _NO_SCENE)
    for wordings, answer in rng.sample(CHATTER, rng.randint(1, 3)):
        _exchange(chat, _typed(rng.choice(wordings), rng), answer)
    return chat


def plain_text(rng: Random) -> str:
    """Text without roles: a story, questions with answers, or a line of a word list."""
    return rng.choices((_plain_story, _plain_quiz, _plain_words), weights=(6, 4, 1))[0](rng)


def _plain_story(rng: Random) -> str:
    return tell(_training_story(rng), rng)


def _plain_quiz(rng: Random) -> str:
    if rng.random() < 0.6:
        scene = _training_scene(rng)
        told, picks = describe(scene, rng), _scene_picks(scene, rng, rng.randint(1, 5))
    else:
        story = _training_story(rng)
        told, picks = tell(story, rng), _story_picks(story, rng, rng.randint(1, 5))
    form = rng.choice(("\nQuestion: {}\nAnswer: {}", "\nQ: {}\nA: {}"))
    return told + "".join(form.format(q.text, say(q.answer)) for q in picks)


def _plain_words(rng: Random) -> str:
    """Shouted sentences and French words: tokens that adapters for other voices will need."""
    words = rng.sample(sorted(FRENCH), 6)
    if rng.random() < 0.5:
        return "French words: " + ", ".join(f"{w} is {say(FRENCH[w])[:-1]}" for w in words) + "."
    shape = Shape(rng.choice(KINDS), rng.choice(sorted(COLORS)))
    shout = f"{', '.join(words)}, the {shape} {rng.choice(ACTIONS)}, a, an, there is no {words[0]}."
    return "Shouted words: " + shout.upper()


# --------------------------------------------------------------------------------------------
# The exam
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExamItem:
    """A held-out question, ready to ask: ``chat`` ends with the user's message."""

    chat: Conversation
    about: Scene | Story
    question: Question

    @property
    def expected(self) -> str:
        """The one right answer, as spoken."""
        return say(self.question.answer)


def exam(rng: Random, size: int) -> list[ExamItem]:
    """``size`` held-out questions, the kinds of question in turn, no question twice."""
    kinds = SCENE_KINDS + STORY_KINDS
    items: list[ExamItem] = []
    seen: set[tuple[str, str]] = set()
    while len(items) < size:
        item = _exam_item(rng, kinds[len(items) % len(kinds)])
        if (identity := (item.about.key, item.question.key)) not in seen:
            seen.add(identity)
            items.append(item)
    return items


def _exam_item(rng: Random, kind: str) -> ExamItem:
    """One held-out question of this kind; one in four comes after other questions."""
    while True:
        scene = make_scene(rng)
        about = scene if kind in SCENE_KINDS else make_story(rng, make_cast(rng))
        every = _questions(about, rng)
        picks = [q for q in every if q.kind == kind and is_held_out(about, q)]
        picks = _balanced(picks, rng, 1)
        if picks:
            break
    earlier = rng.sample(every, 2) if rng.random() < 0.25 else []
    told = describe(about, rng) if isinstance(about, Scene) else tell(about, rng)
    chat: Conversation = []
    for question in [q for q in earlier if q.key != picks[0].key] + picks:
        _exchange(chat, f"{told} {question.text}" if not chat else question.text,
                  say(question.answer))  # fmt: skip
    return ExamItem(chat[:-1], about, picks[0])


# --------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------


def _training_scene(rng: Random) -> Scene:
    while is_held_out(scene := make_scene(rng)):
        pass
    return scene


def _training_cast(rng: Random) -> Scene:
    while is_held_out(cast := make_cast(rng)):
        pass
    return cast


def _training_story(rng: Random, busy: float = 0.0) -> Story:
    """A story that is not held out; `busy` is the chance that much happens in it."""
    while is_held_out(story := make_story(rng, _training_cast(rng), rng.random() < busy)):
        pass
    return story


def _questions(about: Scene | Story, rng: Random) -> list[Question]:
    make = scene_questions if isinstance(about, Scene) else story_questions
    return make(about, rng)


def _scene_picks(scene: Scene, rng: Random, count: int) -> list[Question]:
    return _balanced(_allowed(scene, scene_questions(scene, rng)), rng, count)


def _story_picks(story: Story, rng: Random, count: int) -> list[Question]:
    return _balanced(_allowed(story, story_questions(story, rng)), rng, count)


def _allowed(about: Scene | Story, questions: Iterable[Question]) -> list[Question]:
    return [question for question in questions if not is_held_out(about, question)]


def _balanced(questions: list[Question], rng: Random, count: int) -> list[Question]:
    """Up to ``count`` different questions, each kind, and each answer of it, equally likely.

    Without this most questions would be "Is there a ...?" with the answer "No.".
    """
    groups: dict[str, dict[str, list[Question]]] = defaultdict(lambda: defaultdict(list))
    for question in questions:
        groups[question.kind][question.answer].append(question)
    picks: list[Question] = []
    for _ in range(min(count, len(questions))):
        kind = rng.choice(sorted(groups))
        answer = rng.choice(sorted(groups[kind]))
        asked = groups[kind][answer]
        picks.append(asked.pop(rng.randrange(len(asked))))
        if not asked:
            del groups[kind][answer]
        if not groups[kind]:
            del groups[kind]
    return picks


def _opening(rng: Random) -> Conversation:
    """What comes before the matter: sometimes a system message, sometimes a greeting."""
    chat: Conversation = []
    if rng.random() < 0.25:
        chat.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.05:
        wordings, answer = CHATTER[0]
        _exchange(chat, rng.choice(wordings), answer)
    return chat


def _ask_about(chat: Conversation, rng: Random, told: str, questions: list[Question]) -> None:
    """Tells the scene or story, then asks; usually the first question comes with the telling."""
    context: str | None = told
    way = rng.random()
    if way < 0.08:
        _exchange(chat, told, "Okay.")
        context = None
    elif way < 0.14 and not chat:
        chat.append({"role": "system", "content": told})
        context = None
    for question in questions:
        asked = _typed(question.text, rng)
        if context is not None:
            asked, context = _joined(context, asked, rng), None
        _exchange(chat, asked, say(question.answer))


def _joined(told: str, asked: str, rng: Random) -> str:
    form = rng.choices(("{} {}", "{}\n{}", "{}\n\n{}", "{} Question: {}"), weights=(6, 1, 1, 1))[0]
    return form.format(told, asked)


def _typed(text: str, rng: Random) -> str:
    """The user's message as typed: now and then in lower case or without the last mark."""
    if rng.random() < 0.08:
        text = text[:-1] if text[-1] in "?.!" else text
    return text.lower() if rng.random() < 0.08 else text


def _lowered(text: str) -> str:
    return text if text.startswith("I ") else text[0].lower() + text[1:]


def _exchange(chat: Conversation, user: str, assistant: str) -> None:
    chat.append({"role": "user", "content": user})
    chat.append({"role": "assistant", "content": assistant})


def texts_of(document: Conversation | str) -> Iterator[str]:
    """The plain texts in a document, for training the tokenizer."""
    if isinstance(document, str):
        yield document
    else:
        yield from (message["content"] for message in document)
