"""Chat templates and the tokenizer: what transformers renders, within limits, whatever the template."""

from __future__ import annotations

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quire.errors import RequestError
from quire.platform.inputs import chat, chat_renderer
from quire.platform.inputs.chat import render_chat, render_text
from quire.platform.inputs.chat_messages import check_messages
from quire.platform.inputs.tokenizer import encode_prompt

TEMPLATE = """{{ bos_token }}{% if tools %}
{% for tool in tools %}
[tool]{{ tool | tojson }}
{% endfor %}
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{- message.content | trim }}{% endif %}
    {{- '<|end|>' }}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{%- set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}
{%- if mood is defined %}{{ mood }} {{ ns.count }}{{ dict(a=1)['a'] }}{% endif %}
"""
CHAT = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "Hello <b>é 👍</b>!"},
    {"role": "assistant", "content": "Well met"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "<é>", "parameters": {}}}]


@cache
def tokenizer() -> Any:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=names, show_progress=False)
    inner.train_from_iterator(["Hello well met the the"], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def render(template: str, **kwargs: Any) -> str:
    return render_text(tokenizer(), CHAT, chat_template=template, **kwargs)


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
    assert render_text(tokenizer(), messages, chat_template=seen) == "a\nbxNone[]"
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


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].environ }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ range(1000000000) | list | length }}",
    ],
)
def test_escapes_are_refused(template: str) -> None:
    try:
        text = render(template)
    except RequestError:
        return
    assert text == ""  # jinja2 gives some of them an undefined value instead


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | list | join | length }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ (99999 ** 9999) ** 99999 }}",
    ],
)
def test_endless_templates_are_stopped(template: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_renderer, "RENDER_SECONDS", 0.5)
        begun = time.monotonic()
        with pytest.raises(RequestError, match=r"stopped|memory|failed"):
            render(template)
        assert time.monotonic() - begun < 20
    assert render("{{ messages | length }}") == "3"  # the next one is served


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ [0] * 10 ** 10 }}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
        "{{ ('x' * 100) | replace('', 'y' * 99999) | replace('', 'z' * 999) | length }}",
    ],
)
def test_memory_bombs_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "RENDER_MEMORY", 200 << 20)
    render("warm")
    with pytest.raises(RequestError, match=r"memory|characters|stopped"):
        render(template)
    assert render("{{ messages | length }}") == "3"


def test_size_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="characters, the limit"):
        render("x" * (chat.MAX_TEMPLATE + 1))
    monkeypatch.setattr(chat_renderer, "MAX_INPUT", 1000)
    with pytest.raises(RequestError, match="bytes of JSON, the limit"):
        render_chat(tokenizer(), [{"role": "user", "content": "x" * 1000}])
    monkeypatch.setattr(chat_renderer, "MAX_RENDERED", 100)
    assert len(render("{{ 'a' * 100 }}")) == 100
    with pytest.raises(RequestError, match="more than 100 characters"):
        render("{{ 'a' * 50 }}b{{ 'a' * 50 }}")


def test_the_process_knows_no_secrets_and_is_replaced_when_it_dies() -> None:
    assert render("a") == "a"
    process = chat_renderer.RENDERER._process
    assert process is not None
    environment = Path(f"/proc/{process.pid}/environ")
    if environment.exists():
        names = {entry.split(b"=")[0].decode() for entry in environment.read_bytes().split(b"\0") if entry}
        assert names <= set(chat_renderer._ENVIRONMENT) and "HOME" in os.environ
    process.kill()
    process.wait()
    assert render("b") == "b"


def test_an_interrupted_render_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render("warm") == "warm"
    interrupted = chat_renderer.RENDERER._process
    assert interrupted is not None

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(chat_renderer, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render("the first user's secret")
    assert interrupted.poll() is not None
    assert render("the second's") == "the second's"


def test_an_answer_to_another_job_is_not_taken() -> None:
    assert render("warm") == "warm"
    process = chat_renderer.RENDERER._process
    assert process is not None and process.stdin is not None
    for value in ([0, 5.0, chat_renderer.RENDER_MEMORY, 100], ["a secret", {}]):
        part = json.dumps(value).encode()
        process.stdin.write(chat_renderer._LENGTH.pack(len(part)) + part)
    process.stdin.flush()
    with pytest.raises(RuntimeError, match="another job"):
        render("mine")
    assert render("mine") == "mine"


def test_ctrl_c_does_not_reach_the_process() -> None:
    assert render("warm") == "warm"
    process = chat_renderer.RENDERER._process
    assert process is not None
    assert os.getpgid(process.pid) != os.getpgid(0) and os.getsid(process.pid) != os.getsid(0)
