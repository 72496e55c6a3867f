"""What the bundled model learns of answers with a shape: its template, its documents, the exam, and what it answers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from quire.demo import model_path

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.insert(0, str(TRAINING))

import calling  # noqa: E402
import calls  # noqa: E402
import json_answers  # noqa: E402
import toolbox  # noqa: E402
import world  # noqa: E402

pytestmark = pytest.mark.slow

DRAW = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {
            "type": "object",
            "properties": {
                "shape": {"type": "string", "enum": ["circle", "star"]},
                "color": {"type": "string"},
                "size": {"type": "integer"},
                "tags": {"type": "array"},
                "any": True,
                "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["shape", "color"],
        },
    },
}
NOW = {"name": "now"}
CALLED = {"type": "function", "id": "1", "function": {"name": "draw", "arguments": {"shape": "star", "color": "réd"}}}


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_path())


# --------------------------------------------------------------------------------------------
# The template and the tokens
# --------------------------------------------------------------------------------------------


def test_tools_calls_and_results_are_told(tokenizer) -> None:
    chat: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Draw a star."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALLED, {"function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "12"}]},
    ]
    told = "Tools:\ndraw(shape=circle|star, color, size?=0, tags?=[], any?, either?)\nnow()"
    rest = (
        "<|user|>Draw a star.<|end|><|assistant|>"
        '<tool_call>\n{"name": "draw", "arguments": {"shape": "star", "color": "réd"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end|>'
        "<|tool|>done<|end|><|tool|>12<|end|><|assistant|>"
    )
    render = {"tools": [DRAW, NOW], "tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(chat, **render) == f"<|bos|><|system|>Be brief.\n{told}<|end|>{rest}"
    assert tokenizer.apply_chat_template(chat[1:], **render) == f"<|bos|><|system|>{told}<|end|>{rest}"
    without = tokenizer.apply_chat_template(chat[1:], tokenize=False, add_generation_prompt=True)
    assert without == f"<|bos|>{rest}"


def test_what_is_said_beside_a_call_stays(tokenizer) -> None:
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Okay.", "tool_calls": [CALLED]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert '<|assistant|>Okay.\n<tool_call>\n{"name": "draw"' in text


def test_tags_are_text_and_one_token_each(tokenizer) -> None:
    ids = tokenizer.convert_tokens_to_ids(["<|image|>", "<|tool|>", *calling.TAGS])
    assert ids == [1024, 1025, 1026, 1027] and len(tokenizer) == 1029
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call></tool_call>"


# --------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------


def documents(seed: int, count: int) -> list[calls.Shaped]:
    rng = Random(seed)
    return [calls.call_chat(rng) for _ in range(count)]


def test_the_same_seed_makes_the_same_conversations() -> None:
    assert documents(3, 200) == documents(3, 200)
    one, other = Random(4), Random(4)
    assert [json_answers.json_chat(one) for _ in range(200)] == [json_answers.json_chat(other) for _ in range(200)]


def test_every_call_is_of_a_tool_that_is_there_and_fits_its_schema() -> None:
    """But for listed values: who asks for another one is taken at their word, where nothing holds the model to them."""
    made = 0
    for shaped in documents(5, 600):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in shaped.tools}
        assert len(schemas) == len(shaped.tools)
        for message in shaped.messages:
            for call in message.get("tool_calls", []):
                value = call["function"]["arguments"]
                schema = schemas[call["function"]["name"]]
                for one in schema["properties"].values():
                    one.pop("enum", None)
                if not any(one is None for one in value.values()):
                    jsonschema.validate(value, schema)
                assert list(value) == [key for key in schema["properties"] if key in value]
                made += 1
    assert made > 600


def test_calls_say_what_was_asked_for() -> None:
    rng = Random(6)
    for action in toolbox.ACTIONS:
        for _ in range(60):
            tool = toolbox.make_tool(rng, action)
            request = toolbox.make_request(rng, tool)
            text = request.text.lower()
            for value in request.arguments.values():
                words = [str(value).lower(), *(world.NUMBERS[value : value + 1] if isinstance(value, int) else [])]
                assert any(word in text for word in words), request


def test_training_has_no_call_and_no_wording_that_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[toolbox.Request] = []
    make = toolbox.make_request

    def record(rng: Random, tool: toolbox.Tool, held: bool = False) -> toolbox.Request:
        assert not held
        drawn.append(make(rng, tool))
        return drawn[-1]

    with monkeypatch.context() as patch:
        patch.setattr(calls, "make_request", record)
        documents(7, 1500)
    trained = {(one.name, json.dumps(one.arguments)) for one in drawn if one.name == "draw" and len(one.arguments) == 2}
    assert len(drawn) > 1500
    held = [
        (color, kind)
        for color in world.COLORS
        for kind in world.KINDS
        if toolbox.held_out(toolbox.ACTIONS[0], {"kind": kind, "color": color})
    ]
    assert held
    for _, arguments in trained:
        assert tuple(reversed(list(json.loads(arguments).values()))) not in held
    wordings = [word for action in toolbox.ACTIONS for word in action.wordings if toolbox.wording_held_out(word)]
    assert "sketch {a_color} {kind}" in wordings
    assert not any("sketch" in one.text.lower() for one in drawn)


def test_every_request_of_the_exam_is_held_out() -> None:
    kinds = {item.kind for item in calls.call_exam(Random(8), 70)}
    assert kinds == set(calls.CALL_KINDS)
    for item in calls.call_exam(Random(9), 140):
        if item.kind == "draw(shape, color)":
            (call,) = calls.calls_of(item.expected)
            assert call[0] == "draw" and list(call[1]) == ["shape", "color"]
            assert str(call[1]["color"]) in item.shaped.messages[-1]["content"].lower()


def test_json_answers_follow_from_the_scene() -> None:
    rng = Random(10)
    for _ in range(200):
        scene = world.make_scene(rng)
        asked = json_answers.asked_shapes(scene, rng)
        assert asked.plain == {"shapes": [{"shape": s.kind, "color": s.color} for s in scene.shapes]}
        words = sorted(word for shape in scene.shapes for word in (shape.kind, shape.color))
        for form in asked.forms:
            parts = form
            if isinstance(form, dict) and any(isinstance(value, list) for value in form.values()):
                parts = [value for value in form.values() if isinstance(value, list)]
            elif isinstance(form, dict):
                parts = list(form.values())
            # Keys such as "shape_color" are no values.
            found = re.findall(rf"\b({'|'.join((*world.COLORS, *world.KINDS))})\b(?!\": )", json.dumps(parts))
            assert sorted(found) == words, form
            jsonschema.validate(form, json_answers.schema_of(form))


def test_what_a_schema_forces_at_the_start_is_the_start() -> None:
    for item in json_answers.json_exam(Random(11), 200):
        whole = json.dumps(item.expected)
        assert whole.startswith(item.begun)
        assert bool(item.begun) == item.kind.endswith("forced")


# --------------------------------------------------------------------------------------------
# What of an answer counts
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"color": "red"}', ['red"']),
        ('{"count":2,"shapes":["star","circle"]}', ["2", 'star"', ",", 'circle"', "]"]),
        ('[{"a": null}, {"a": true}]', ["null", ",", "true", "]"]),
        ('<tool_call>\n{"name": "draw", "arguments": {"size": 1.5}}\n</tool_call>', ['draw"', "1.5"]),
    ],
)
def test_values_are_told_from_the_frame(text: str, values: list[str]) -> None:
    assert [text[first:last] for first, last in calling.chosen(text)] == values


def test_where_the_shape_is_given_only_values_count(tokenizer) -> None:
    asked = {"role": "user", "content": "There is a red star. What color is the star?"}
    weights = {}
    for given in (True, False):
        answer = {"role": "assistant", "content": '{"color": "red"}', "given": given}
        ids, weights[given] = calling.encode(calls.Shaped([asked, answer]), tokenizer, 0.25)
        assert ids == tokenizer.apply_chat_template([asked, answer], tokenize=True, return_dict=False)
    start = ids.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
    assert not any(weights[True][:start]) and not any(weights[False][:start])
    counted = [tokenizer.decode([one]) for one, weight in zip(ids, weights[True], strict=True) if weight]
    assert counted == ["red", '"']
    assert all(weights[False][start:]) and weights[False][start] == weights[False][-1] == 1.0


# --------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["quire", "transformers"])
@pytest.mark.parametrize("name", ["json", "calls"])
def test_the_model_answers_in_shape(backend: str, name: str) -> None:
    import evaluate_demo

    items = evaluate_demo.EXAMS[name](5, 84)
    answerer = {"quire": evaluate_demo._quire, "transformers": evaluate_demo._transformers}[backend](model_path())
    answers = answerer(items)
    asked = [
        (item, answer)
        for item, answer in zip(items, answers, strict=True)
        if item.groups[0] in ("shapes", "draw(shape, color)", "count(kind)")
    ]
    assert len(asked) > 15
    assert sum(item.right(answer) for item, answer in asked) >= 0.9 * len(asked)
