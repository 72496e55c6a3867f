"""Reasoning told apart from the answer, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.platform.outputs.messages.harmony import HARMONY
from quire.platform.outputs.messages.message import Message
from quire.platform.outputs.messages.reasoning_formats import FORMATS
from tests.platform.outputs.messages.reading import message_format, message_of, tools

THINK = message_format("hermes", "deepseek_r1")
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("content", ["It is.", "", "It is <b>\n\nthat."])
def test_reasoning_then_content(one: object, content: str) -> None:
    format = message_format("hermes", one.name)  # type: ignore[attr-defined]
    begins, ends = one.begins, one.ends  # type: ignore[attr-defined]
    for begin, end in [(begin, end) for begin in begins for end in ends]:
        text = f"\nWell <i>\n\nso {begin[:-1]} {end[:-1]}\n{end}\n\n{content}"
        want = Message(content, f"Well <i>\n\nso {begin[:-1]} {end[:-1].rstrip()}")
        assert message_of(format, begin + text) == want
        assert message_of(format, text, begins_in_reasoning=True) == want
        assert message_of(format, begin + text, begins_in_reasoning=True) == want  # opened once more
        assert message_of(format, text) == Message(text)  # the model did not think


def test_reasoning_that_does_not_end() -> None:
    assert message_of(THINK, "<think>\nHmm </thi") == Message("", "Hmm </thi")
    assert message_of(THINK, "Hmm \n", begins_in_reasoning=True) == Message("", "Hmm")
    assert message_of(THINK, "<think>\n\n</think>\n\nYes") == Message("Yes")
    assert message_of(THINK, "<thin") == Message("<thin")
    assert message_of(THINK, " a <think>") == Message(" a <think>")


def test_calls_in_reasoning_are_thoughts() -> None:
    message = message_of(THINK, f"<think>Shall I {CALL}?</think>\n{CALL}")
    assert message.reasoning == f"Shall I {CALL}?" and message.content is None
    assert [call.name for call in message.tool_calls] == ["get_time"]
    text = f"<think>So</think>\n\nText\n{CALL}"
    assert message_of(THINK, text, tools(choice="none")) == Message("Text", "So")
    assert message_of(message_format(None, "think"), text, tools(choice="none")) == Message(f"Text\n{CALL}", "So")


def test_an_answer_in_tags_of_its_own() -> None:
    granite = message_format("hermes", "granite_think")
    assert message_of(granite, "<think>a</think>\n<response>b < c</response>") == Message("b < c", "a")
    assert message_of(granite, "<think>a</think>b</response>") == Message("b</response>", "a")


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|assistant|>\n<think>\n", True),
        ("<think></think><|assistant|>", None),
        ("<|assistant|>\n<think>\n\n</think>\n\n", False),
        ("what does <think> mean?<|assistant|>", None),
    ],
)
def test_where_an_answer_begins(prompt: str, begun: bool | None) -> None:
    assert THINK.begins_in_reasoning(prompt) is begun


def test_where_an_answer_goes_on() -> None:
    assert THINK.begins_in_reasoning("<think>a", "<think>a") is True
    assert THINK.begins_in_reasoning("<think>a</think>b", "<think>a</think>b") is False
    assert THINK.begins_in_reasoning("b", "b") is None
    assert message_format("hermes").begins_in_reasoning("<think>") is None


# gpt-oss

GPT = message_format("openai", "openai_gptoss", specials=["<|channel|>", "<|message|>", "<|endoftext|>"])
ANALYSIS = "<|channel|>analysis<|message|>They ask for <b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is <|b|>."
TO_TIME = "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (ANALYSIS + FINAL, Message("It is <|b|>.", "They ask for <b>.")),
        (ANALYSIS + FINAL + "<|return|>", Message("It is <|b|>.", "They ask for <b>.")),
        (FINAL.removeprefix("<|start|>assistant"), Message("It is <|b|>.")),
        (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL,
         Message("It is <|b|>.", "They ask for <b>.\n\nThey ask for <b>.")),
        ("<|channel|>commentary<|message|>First,<|end|>" + FINAL, Message("First,\n\nIt is <|b|>.")),
        (ANALYSIS + "<|start|>assista", Message("", "They ask for <b>.")),
        ("<|channel|>ana", Message("")),
        ("Plain.", Message("Plain.")),
        ("a" * 2000, Message("a" * 2000)),
        (ANALYSIS + FINAL + "<|endoftext|>", Message("It is <|b|>.", "They ask for <b>.")),
    ],
)  # fmt: skip
def test_channels(text: str, want: Message) -> None:
    assert message_of(GPT, text) == want


@pytest.mark.parametrize(
    "head",
    [
        TO_TIME,
        "<|start|>assistant<|channel|>commentary to=functions.get_time json<|message|>",
        "<|start|>assistant to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>",
        "<|start|>assistant<|channel|>analysis to=functions.get_time code<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", ""])
def test_calls_on_channels(head: str, end: str) -> None:
    arguments = '{"a": "<|call|> \\"é\\"", "b": {}}'
    text = f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>{head}{arguments}{end}"
    message = message_of(GPT, text)
    assert (message.content, message.reasoning) == ("Wait.", "They ask for <b>.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("get_time", arguments)]
    first = message_of(GPT, f"{head.removeprefix('<|start|>assistant')}{arguments}{end}")
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("get_time", arguments)]
    several = message_of(GPT, text + f"{head}{{}}<|call|>" if end else f"{text}<|call|>{head}{{}}")
    assert [call.arguments for call in several.tool_calls] == [arguments, "{}"]


def test_without_tools_a_call_s_text_is_content() -> None:
    text = TO_TIME.removeprefix("<|start|>assistant") + "{}"
    assert message_of(message_format(None, "harmony"), text, tools(choice="none")) == Message("{}")
    assert message_of(GPT, text, tools(choice="none")) == Message("")


def test_where_a_message_goes_on() -> None:
    assert GPT.begins_in_reasoning("<|start|>user<|message|>a<|end|><|start|>assistant") is None
    opened = "<|start|>assistant<|channel|>{}<|message|>So"
    assert GPT.begins_in_reasoning(opened.format("analysis")) is True
    assert GPT.begins_in_reasoning(opened.format("final")) is False
    assert message_of(GPT, f" it<|end|>{FINAL}", begins_in_reasoning=True) == Message("It is <|b|>.", "it")
    assert message_of(GPT, " it<|return|>", begins_in_reasoning=False) == Message(" it")


@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(
    parts=st.lists(
        st.sampled_from([*HARMONY.notation, ANALYSIS, FINAL, TO_TIME, "{", "}", "a", " ", "to="]), max_size=12
    )
)
def test_any_text_of_channels_is_read_the_same_however_it_is_cut(parts: list[str]) -> None:
    message_of(GPT, "".join(parts))
