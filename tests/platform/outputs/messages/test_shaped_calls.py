"""Whatever the shape of calls lets a model write is read as calls that its functions' schemas allow."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.platform.outputs.messages.message import collect
from quire.platform.outputs.messages.message_format import MessageFormat
from quire.platform.outputs.messages.tool_formats import FORMATS
from quire.platform.sampling.structured.compilation import compile_constraint
from tests.platform.outputs.messages.reading import message_format, message_of, read, tools

LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": -9, "maximum": 99},
        "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"const": "é"}},
                 "required": ["a"], "additionalProperties": False}]},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}  # fmt: skip
WAIT = {"type": "object", "properties": {"x": {"type": "number", "enum": [1, 2.5]}}, "additionalProperties": False}
SCHEMAS = {"look": LOOK, "wait": WAIT}
GIVEN = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
SPECIALS = sorted({text for one in FORMATS for text in one.notation if text[0] in "<[" and text.count("<") < 2})
EOS = "<eos>"


class Words:
    """A vocabulary of one token a byte, and of the special tokens of all formats."""

    def __init__(self) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.ids = {piece: number for number, piece in enumerate([EOS, *SPECIALS, *letters])}
        inner = Tokenizer(models.BPE(vocab=self.ids, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(text, normalized=False) for text in (EOS, *SPECIALS)])
        self.fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS)
        self.tokenizer = LLTokenizer(inner.to_str(), eos_token=0)

    def special_tokens(self) -> dict[str, int]:
        return {text: self.ids[text] for text in (EOS, *SPECIALS)}


@cache
def words() -> Words:
    return Words()


def walk(grammar: str, chance: random.Random) -> str:
    """A text that a grammar lets through."""
    matcher = LLMatcher(words().tokenizer, grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids: list[int] = []
    while not matcher.is_stopped():
        assert len(ids) < 3000
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        assert allowed
        token = chance.choice(allowed)
        if token == 0:
            break
        assert matcher.consume_token(token)
        ids.append(token)
    return str(words().fast.decode(ids, skip_special_tokens=False))


def answers(format: MessageFormat, asked: Any, chance: random.Random) -> str:
    """An answer that the shape of these tools' calls lets through."""
    shape = format.constraint(asked)
    assert shape is not None
    made = compile_constraint(shape, words())
    if made.grammar is not None:
        return walk(made.grammar, chance)
    (trigger,) = made.triggers
    return "Well: " + trigger.text + walk(trigger.grammar, chance)


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
@pytest.mark.parametrize("choice", ["auto", "required", "look"])
def test_what_is_let_through_is_read_and_valid(name: str, choice: str) -> None:
    (one,) = (one for one in FORMATS if one.name == name)
    format = message_format(name, one.together or None)
    named = {"type": "function", "function": {"name": choice}} if choice == "look" else choice
    if choice == "auto" and format.constraint(tools(*GIVEN)) is None:
        return
    chance = random.Random(name + choice)
    for turn in range(4):
        asked = tools(*GIVEN, choice=named, parallel=turn % 2 == 0)
        text = answers(format, asked, chance)
        message = message_of(format, text, asked)
        assert message.tool_calls, text
        assert turn % 2 == 0 or len(message.tool_calls) == 1
        for call in message.tool_calls:
            assert choice != "look" or call.name == "look"
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert (message.content or "") in (("Well:", "Well: ") if choice == "auto" else ("",)), text


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_is_cut_off_is_a_call_or_nothing(name: str, choice: str) -> None:
    (one,) = (one for one in FORMATS if one.name == name)
    format, asked = message_format(name, one.together or None), tools(*GIVEN, choice=choice)
    if format.constraint(asked) is None:
        return
    text = answers(format, asked, random.Random(name))
    opened = 0 if choice == "required" else text.index(one.begins[0]) + len(one.begins[0]) + one.begins[0].isalpha()
    for end in range(opened, len(text) + 1):
        message = collect(read(format, [text[:end]], asked, cut=True))
        assert (message.content or "").strip() in ("", "Well:"), text[:end]
        assert all(call.name in SCHEMAS for call in message.tool_calls), text[:end]
        if end % 7 == 0:
            assert collect(read(format, list(text[:end]), asked, cut=True)) == message
