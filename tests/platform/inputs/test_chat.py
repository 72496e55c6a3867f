"""Chat templates and the tokenizer: what transformers renders, within limits, whatever the template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quire.errors import RequestError
from quire.platform.inputs import chat, chat_renderer
from quire.platform.inputs.chat import render_chat, render_text
from quire.platform.inputs.chat_messages import check_messages
from quire.platform.inputs.tokenizer import encode_prompt
from tests.platform.inputs.chats import CHAT, TEMPLATE, render, tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "<é>", "parameters": {}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("template_kwargs", [{}, {"mood": "calm"}])
def test_renders_what_transformers_renders(tools: Any, generation: bool, template_kwargs: dict[str, str]) -> None:
    theirs = tokenizer().apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=generation, tokenize=False, **template_kwargs
    )
    ours = render_text(
        tokenizer(), CHAT, tools=tools, add_generation_prompt=generation, template_kwargs=template_kwargs
    )
    assert ours == theirs


def test_bos_is_not_doubled() -> None:
    ids = render_chat(tokenizer(), CHAT).token_ids
    assert ids.count(tokenizer().bos_token_id) == 1 and ids[0] == tokenizer().bos_token_id
    assert tokenizer().decode(ids) == render_text(tokenizer(), CHAT)
    assert encode_prompt(tokenizer(), "Hello")[0] == tokenizer().bos_token_id


def test_tools_may_be_functions() -> None:
    def look(place: str) -> str:
        """Look somewhere.

        Args:
            place: where to look
        """
        return place

    theirs = tokenizer().apply_chat_template(CHAT, tools=[look], add_generation_prompt=True, tokenize=False)
    assert render_text(tokenizer(), CHAT, tools=[look]) == theirs
    for bad in ("look", [3], [lambda x: x]):
        with pytest.raises(RequestError, match="tools"):
            render_text(tokenizer(), CHAT, tools=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["Well met", " Well met ", "Well"])
def test_continue_the_final_message(content: str) -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": content}]
    text = render_text(tokenizer(), messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|assistant|>" + content)
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render_text(tokenizer(), messages, continue_final_message=True)


def test_continue_needs_text_that_the_template_shows() -> None:
    for messages, template in (([{"role": "assistant", "content": " "}], TEMPLATE), (CHAT, "nothing")):
        with pytest.raises(RequestError, match="continue_final_message"):
            render_text(
                tokenizer(), messages, chat_template=template, add_generation_prompt=False,
                continue_final_message=True,
            )  # fmt: skip


DEVELOPERS = {
    "refused": (TEMPLATE, "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"),
    "left out": (
        "{% for m in messages if m.role in ['system', 'user'] %}{{ m.role }}: {{ m.content }} {% endfor %}",
        "system: Be brief. user: Hi ",
    ),
    "written": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}",
        "developer: Be brief. user: Hi ",
    ),
    "written in parts": (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}",
        None,  # what a text model's template never gets
    ),
}


@pytest.mark.parametrize(("template", "want"), DEVELOPERS.values(), ids=DEVELOPERS)
def test_a_developer_is_the_system_where_the_template_has_no_place_for_one(template: str, want: str | None) -> None:
    def rendered(*roles: str) -> str:
        messages = [{"role": role, "content": text} for role, text in zip(roles, ("Be brief.", "Hi"), strict=True)]
        return render_text(tokenizer(), messages, chat_template=template)

    if want is not None:
        assert rendered("developer", "user").removeprefix("<s>") == want
    else:
        assert rendered("developer", "user") != rendered("system", "user")


def test_a_template_that_knows_no_system_either_says_so() -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="no system"):
        render_text(tokenizer(), messages, chat_template=template)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ reasoning_effort }}{% for m in messages %}{{ m.thinking }}{% endfor %}", {"reasoning_effort", "messages"}),
        ("{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}", {"effort"}),
        ("{% macro say() %}{{ effort }}{% endmacro %}{{ say() }}", {"effort"}),
        ("{% set effort = 'low' %}{{ effort }}{{ strftime_now('%Y') }}{{ raise_exception }}{{ namespace }}", set()),
        ("{% generation %}{{ effort | default('low') }}{% endgeneration %}", {"effort"}),
        ("{{ broken", set()),
        ("{{ (" * 100_000, set()),
    ],
)
def test_the_variables_of_a_template(template: str, names: set[str]) -> None:
    assert chat.template_variables(template) == names
    assert render_text(tokenizer(), CHAT[1:2], chat_template="{{ messages[0].content }}") == CHAT[1]["content"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "tool_calls": []}]
    seen = "{{ messages[0].content }}{{ messages[0].name }}{{ messages[1].content }}{{ messages[1].tool_calls }}"
    assert render_text(tokenizer(), messages, chat_template=seen) == "a\nbx[]"  # as transformers: null is left out
    assert check_messages(messages) == (
        [
            {"role": "user", "content": ["a", "b"], "name": "x"},
            {"role": "assistant", "content": None, "tool_calls": []},
        ],
        [],
    )


def test_a_text_model_is_rendered_once_and_its_messages_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    render_as_before = chat_renderer.RENDERER.render

    def spy(template: str, variables: Any) -> str:
        jobs.append(variables)
        return render_as_before(template, variables)

    render_chat(tokenizer(), CHAT)  # the first time it is found out which form of content the template takes
    monkeypatch.setattr(chat_renderer.RENDERER, "render", spy)
    prompt = render_chat(tokenizer(), CHAT)
    assert [job["messages"] for job in jobs] == [CHAT] and prompt.images == []
    text = tokenizer().apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert prompt.token_ids == tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "list of messages"),
        (None, "messages"),
        ([CHAT[0], "x"], r"messages\[1\]"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "u" * 1000, "content": "x"}], r"messages\[0\].role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\].text"),
        ([CHAT[0], {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
         r"messages\[1\].content\[1\] is of type 'image_url', and this model takes text only"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        render_chat(tokenizer(), messages)


@pytest.mark.parametrize("given", [[1], "ab", 5, {1: 2}, {"messages": 5}, {"tools": []}, {"add_generation_prompt": 0}])
def test_template_kwargs_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        render("{{ x }}", template_kwargs=given)


def test_values_that_are_no_json_are_refused() -> None:
    for value in (object(), {1, 2}, b"x"):
        with pytest.raises(RequestError, match="JSON"):
            render("{{ x }}", template_kwargs={"x": value})


def test_no_template_and_no_tokenizer() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    with pytest.raises(RequestError, match="pass chat_template"):
        render_chat(bare, CHAT)
    assert render_chat(bare, CHAT, chat_template="Hello").token_ids == encode_prompt(tokenizer(), "Hello")[1:]
    with pytest.raises(RequestError, match="tokenizer"):
        render_chat(None, CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{% for x in", "end of template"),
        ("{% nonsense %}", "nonsense"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "TypeError"),
    ],
)
def test_a_template_that_fails_says_why(template: str, message: str) -> None:
    with pytest.raises(RequestError, match="chat template failed") as refused:
        render(template)
    assert message in str(refused.value)
