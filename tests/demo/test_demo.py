"""The bundled model, the world it was trained on, and the split that keeps its exam unseen."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from quire.demo import model_path

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.insert(0, str(TRAINING))

import dialogues  # noqa: E402
import questions  # noqa: E402
import world  # noqa: E402

pytestmark = pytest.mark.slow

SHAPE = re.compile(rf"({'|'.join(world.COLORS)}) ({'|'.join(world.KINDS)})")


# --------------------------------------------------------------------------------------------
# The world
# --------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_documents() -> None:
    first, second = Random(3), Random(3)
    for _ in range(300):
        assert dialogues.training_document(first) == dialogues.training_document(second)


def test_a_description_names_exactly_the_shapes_of_its_scene() -> None:
    rng = Random(4)
    for _ in range(500):
        scene = world.make_scene(rng)
        expected = Counter(map(str, scene.shapes))
        for text in (world.describe(scene), world.describe(scene, rng)):
            assert Counter(" ".join(found) for found in SHAPE.findall(text)) == expected


def test_scene_answers_follow_from_the_description() -> None:
    rng = Random(5)
    for _ in range(300):
        scene = world.make_scene(rng)
        shapes = SHAPE.findall(world.describe(scene, rng))
        for question in questions.scene_questions(scene, rng):
            assert _answer_from(shapes, question.text) == question.answer, question


def _answer_from(shapes: list[tuple[str, str]], asked: str) -> str:
    """Answers a scene question from the (colour, kind) pairs and the question's words alone."""
    color = next((c for c in world.COLORS if re.search(rf"\b{c}\b", asked)), None)
    kind = next((k for k in world.KINDS if re.search(rf"\b{k}s?\b", asked)), None)
    matching = [s for s in shapes if color in (None, s[0]) and kind in (None, s[1])]
    if asked.startswith(("How many", "Count")):
        return world.NUMBERS[len(matching)]
    if asked.startswith(("Is ", "Do ")):
        return "yes" if matching else "no"
    if kind is not None:
        colors = [c for c, k in shapes if k == kind]
        assert len(colors) <= 1, "the question has more than one answer"
        return colors[0] if colors else f"there is no {kind}"
    assert len(matching) == 1, "the question has not one answer"
    return matching[0][1]


def test_story_answers_follow_from_the_events() -> None:
    rng = Random(6)
    for _ in range(300):
        story = world.make_story(rng, world.make_cast(rng))
        text = world.tell(story, rng)
        for question in questions.story_questions(story, rng):
            assert question.answer in _story_answers(story, question), (text, question)
            assert len(_story_answers(story, question)) == 1, (text, question)
            if question.kind != "count":
                assert question.answer.removeprefix("the ") in text


def _story_answers(story: world.Story, question: questions.Question) -> set[str]:
    """Every answer that the facts allow, by comparing each fact with the question's words."""
    scene, asked = story.scene, question.text
    if question.kind == "count":
        return {world.NUMBERS[len(scene.shapes)]}
    if question.kind == "color":
        return {s.color for s in scene.shapes if s.kind in asked}
    meant = _meant(story, asked)
    answers: set[str] = set()
    for shape, name in zip(scene.shapes, story.names, strict=True):
        if question.kind == "name" and str(shape) in asked:
            answers.add(name)
        if question.kind == "who is" and name and name in asked:
            answers.add(f"the {shape}")
    for event in story.events:
        actor = scene.shapes[event.actor]
        if question.kind == "where" and event.verb == "go" and event.actor in meant:
            answers.add(f"the {event.what}")
        elif question.kind == "found" and event.verb == "find" and event.actor in meant:
            answers.add(world.a(event.what))
        elif question.kind in ("who went", "who found", "did") and event.what:
            if re.search(rf"\b{event.what}\b", asked):
                answers.add(f"the {actor}")
        elif question.kind == "met" and event.verb == "meet":
            if event.actor in meant:
                answers.add(f"the {scene.shapes[event.other]}")
            if event.other in meant:
                answers.add(f"the {actor}")
    return answers


def _meant(story: world.Story, asked: str) -> set[int]:
    """The numbers of the shapes that the question's words can mean."""
    full = {i for i, s in enumerate(story.scene.shapes) if str(s) in asked}
    named = {i for i, n in enumerate(story.names) if n and re.search(rf"\b{n}\b", asked)}
    loose = {i for i, s in enumerate(story.scene.shapes) if f"the {s.kind}" in asked}
    return full or named or loose


# --------------------------------------------------------------------------------------------
# The split
# --------------------------------------------------------------------------------------------


def test_about_one_question_in_five_is_held_out() -> None:
    rng, held, total = Random(7), 0, 0
    for _ in range(300):
        scene = world.make_scene(rng)
        for question in questions.scene_questions(scene, rng):
            held += world.is_held_out(scene, question)
            total += 1
    assert 0.12 < held / total < 0.26  # 10 % of the scenes and 10 % of the other questions


def test_the_split_ignores_order_and_wording() -> None:
    rng = Random(8)
    for _ in range(100):
        scene = world.make_scene(rng)
        turned = world.Scene(scene.shapes[::-1])
        first = {q.key: world.is_held_out(scene, q) for q in questions.scene_questions(scene, rng)}
        again = {q.key: world.is_held_out(turned, q) for q in questions.scene_questions(turned, rng)}
        assert first == again


def test_training_and_exam_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records what training draws, through the functions by which it can draw anything."""
    trained: set[tuple[str, str]] = set()
    subjects: set[str] = set()
    balanced, allowed, drawn = dialogues._balanced, dialogues._allowed, []

    def record_allowed(about, questions):
        subjects.add(about.key)
        drawn.append(about)
        return allowed(about, questions)

    def record_balanced(questions, rng, count):
        picks = balanced(questions, rng, count)
        trained.update((drawn[-1].key, question.key) for question in picks)
        return picks

    with monkeypatch.context() as patch:
        patch.setattr(dialogues, "_allowed", record_allowed)
        patch.setattr(dialogues, "_balanced", record_balanced)
        rng = Random(9)
        for _ in range(4000):
            dialogues.training_document(rng)
    items = dialogues.exam(Random("exam 1"), 1300)
    assert len(trained) > 4000
    assert not trained & {(item.about.key, item.question.key) for item in items}
    assert not subjects & {item.about.key for item in items if world.is_held_out(item.about)}
    assert all(world.is_held_out(item.about, item.question) for item in items)


def test_every_exam_chat_ends_with_the_question() -> None:
    for item in dialogues.exam(Random(10), 100):
        assert item.chat[-1]["role"] == "user"
        assert item.chat[-1]["content"].endswith(item.question.text)
        assert item.expected == world.say(item.question.answer)


# --------------------------------------------------------------------------------------------
# The model's files
# --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_path())


def test_the_model_is_complete_and_small() -> None:
    names = {path.name for path in model_path().iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    wanted |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert wanted | {"preprocessor_config.json", "processor_config.json"} <= names
    assert sum(path.stat().st_size for path in model_path().iterdir()) < 12_000_000


def test_the_files_name_no_path_of_the_machine_that_made_them() -> None:
    for path in model_path().glob("*.json"):
        assert "_name_or_path" not in path.read_text(encoding="utf-8")


def test_the_weights_are_bf16_and_at_most_four_million() -> None:
    """Reads the header of the safetensors file itself: its length, then JSON."""
    with (model_path() / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    assert {tensor["dtype"] for tensor in tensors} == {"BF16"}
    assert 0 < sum(_product(tensor["shape"]) for tensor in tensors) <= 4_000_000


def _product(numbers: list[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def test_the_config_agrees_with_the_tokenizer(tokenizer) -> None:
    config = json.loads((model_path() / "config.json").read_text(encoding="utf-8"))
    generation = json.loads((model_path() / "generation_config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert text["vocab_size"] == len(tokenizer)
    assert text["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert text["bos_token_id"] == tokenizer.bos_token_id
    assert text["pad_token_id"] == tokenizer.pad_token_id
    assert config["image_token_index"] == tokenizer.convert_tokens_to_ids("<|image|>")


@pytest.mark.parametrize(
    "text",
    [
        "There is a red circle.", "ROUGE, carré, étoile!", "日本語 \U0001f7e5 \u0644\u064a",
        " two  spaces\n\tand\r\nlines ", "\x00\x7f\u200d\ufeff", "def f(x): return x ** 2 ,  . 's",
        "".join(map(chr, range(1, 0x3000, 7))),
    ],
)  # fmt: skip
def test_any_text_round_trips(tokenizer, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_renders(tokenizer) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " There is a red circle. What color is the circle? "},
        {"role": "assistant", "content": "Red."},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|>"
        "<|user|>There is a red circle. What color is the circle?<|end|>"
        "<|assistant|>Red.<|end|>"
    )
    prompt = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt) and prompt.endswith("<|assistant|>")
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 3


def test_the_chat_template_refuses_an_unknown_role(tokenizer) -> None:
    with pytest.raises(Exception, match="Unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "Hi"}], tokenize=False)
