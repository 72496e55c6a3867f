"""Calls of tools in a conversation: checked, and as each template takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import RequestError
from quire.platform.inputs.chat import render_text
from quire.platform.inputs.chat_messages import check_messages
from tests.models.chat.format import TEMPLATES
from tests.platform.inputs.chats import tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ARGUMENTS = '{"at": "<é>", "n": [1, {"deep": null}]}'
CALL = {"id": "call_one", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
ASK = {"role": "user", "content": "Look!"}
TALK = [
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_two"}]},
    {"role": "tool", "tool_call_id": "call_one", "content": [{"type": "text", "text": "a sea"}]},
    {"role": "tool", "tool_call_id": "call_two", "content": "a hill"},
]
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}
{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Of an answer of calls alone DeepSeek's asks whether its content is none; arguments are texts.
DEEPSEEK = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- '<User>' + message['content'] }}{%- elif message['role'] == 'tool' %}{{ '<output>' + message['content'] }}
{%- else %}{% for tool in message['tool_calls'] %}{% if message['content'] is none %}
{{- '<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] + '<end>' }}
{%- else %}{{ message['content'] + '<call>' + tool['function']['name'] + tool['function']['arguments'] }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""
# Qwen3's first, which fails on a content that is missing.
NEEDS_CONTENT = """{% for m in messages %}{{ m.role + ': ' + m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}
{{- raise_exception('nine, please') }}{% endif %}{{ '[TOOL_RESULTS]' + m.tool_call_id + m.content }}
{%- else %}[TOOL_CALLS][{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('nine') }}
{%- endif %}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
{%- endfor %}]{% endif %}{% endfor %}"""
PARTS = """{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}
{%- for call in m.tool_calls %}{{ call.function.name }}={{ call.function.arguments | tojson }};{% endfor %}
{%- endfor %}"""
NO_CALLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def rendered(template: str, messages: Any = TALK, **options: Any) -> str:
    return render_text(tokenizer(), messages, chat_template=template, **options)


def for_transformers(form: Any, **more: Any) -> list[dict[str, Any]]:
    """TALK as the template wants it, made by hand."""
    calls = [{**call, "function": {"name": "look", "arguments": form(ARGUMENTS)}} for call in TALK[1]["tool_calls"]]
    return [ASK, {"role": "assistant", "tool_calls": calls, **more}, {**TALK[2], "content": "a sea"}, TALK[3]]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("template", "theirs"),
    [
        (QWEN, for_transformers(json.loads)),
        (DEEPSEEK, for_transformers(str, content=None)),
        (NEEDS_CONTENT, for_transformers(json.loads, content="")),
        (NO_CALLS, [ASK, {"role": "assistant", "content": "Aye"}, {"role": "tool", "content": "5"}]),
    ],
    ids=["qwen", "deepseek", "needs content", "no calls"],
)
def test_renders_what_transformers_renders(template: str, theirs: Any, tools: Any) -> None:
    # Below apply_chat_template, which takes out a content that is none, for which DeepSeek's template asks.
    (want,), _ = render_jinja_template(
        [theirs], tools=tools, chat_template=template, add_generation_prompt=True, **tokenizer().special_tokens_map
    )
    given = theirs if template == NO_CALLS else TALK
    assert rendered(template, given, tools=tools) == want
    assert ("<é>" in want) == (template != NO_CALLS)


def test_arguments_may_be_a_dict_and_the_model_s_own_text_stays_where_texts_are_wanted() -> None:
    odd = '{"at":"sea" , "n":1.50}'
    for arguments, text in ((odd, odd), ({"at": "é"}, '{"at": "é"}'), ("", "{}"), (None, "{}")):
        call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
        messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert f"<sep>{text}<end>" in rendered(DEEPSEEK, messages)
        assert json.dumps(json.loads(text), ensure_ascii=False) in rendered(QWEN, messages)


def test_ids_of_nine_letters_where_the_template_wants_them() -> None:
    text = rendered(MISTRAL)
    ids = [part[:9] for part in text.split('"id": "')[1:]]
    assert len(set(ids)) == 2 and all(one.isalnum() and len(one) == 9 for one in ids)
    assert f"[TOOL_RESULTS]{ids[0]}a sea" in text and f"[TOOL_RESULTS]{ids[1]}a hill" in text
    nine = json.loads(json.dumps(TALK).replace("call_one", "abcDEF123"))
    assert '"id": "abcDEF123"' in rendered(MISTRAL, nine) and "[TOOL_RESULTS]abcDEF123a sea" in rendered(MISTRAL, nine)


def test_a_template_of_parts() -> None:
    assert 'assistant:look={"at": "<é>"' in rendered(PARTS) and "tool:a sea" in rendered(PARTS)


def test_what_came_before_tools() -> None:
    messages = [
        ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": ARGUMENTS}},
        {"role": "function", "name": "look", "content": "a sea"},
    ]
    assert rendered(QWEN, messages) == rendered(QWEN, [ASK, {**TALK[1], "tool_calls": [CALL]}, TALK[2]])


def test_calls_that_the_template_leaves_out_are_refused() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls: .* writes no calls"):
        rendered(NO_CALLS)
    with pytest.raises(RequestError, match="nine, please"):  # the template's own word
        rendered(MISTRAL, [ASK, {"role": "tool", "content": "5"}])


def test_a_marker_in_arguments_stays_text() -> None:
    call = {"function": {"name": "look", "arguments": '{"at": "\\u003cimage> <image>"}'}}
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "<image> <image>" in rendered(QWEN, messages, image_marker="<image>")


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "assistant", "tool_calls": "look"}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [CALL] * 2000}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL, {"id": "a"}]}, r"tool_calls\[1\].function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, r"tool_calls\[0\].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}, r"tool_calls\[0\].id"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, r"tool_calls\[0\].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
            r"tool_calls\[0\].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]},
            r"tool_calls\[0\].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 99999}}]},
            r"tool_calls\[0\].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "1" * 9999}}]},
            r"tool_calls\[0\].function.arguments",
        ),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call.name"),
        ({"role": "assistant", "function_call": {"name": "a"}, "tool_calls": [CALL]}, "function_call"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "tool", "content": "a", "name": ["a"]}, "name"),
        ({"role": "tool"}, "content"),
    ],
)
def test_malformed_calls_are_refused_by_their_place(message: Any, where: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\]\.{where}"):
        check_messages([ASK, message])


def with_transformers(template: str, messages: Any, tools: Any) -> str | None:
    """What transformers renders; None where the template fails."""
    options = {"tools": tools, "chat_template": template, "add_generation_prompt": True}
    try:
        return str(render_jinja_template([messages], **options, **tokenizer().special_tokens_map)[0][0])
    except (TemplateError, TypeError):
        return None


def with_quire(template: str, messages: Any, tools: Any) -> str | None:
    try:
        return rendered(template, messages, tools=tools)
    except RequestError:
        return None


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_families_templates_see_tools_and_their_answers_as_with_transformers(path: Path, tools: Any) -> None:
    template = path.read_text(encoding="utf-8")
    answered = [{"role": "assistant", "content": "Aye"}, {"role": "tool", "content": "5", "tool_call_id": "a"}]
    for messages in ([ASK], [ASK, *answered]):
        # quire gives parts to templates that take nothing else; transformers leaves that to its caller
        parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        theirs = {with_transformers(template, given, tools) for given in (messages, parts)}
        ours = with_quire(template, messages, tools)
        assert ours in theirs and (ours is not None or theirs == {None})
