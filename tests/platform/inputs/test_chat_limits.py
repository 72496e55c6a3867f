"""Templates are programs of others': what they may not reach, and what bounds them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.platform.inputs import chat, chat_renderer
from quire.platform.inputs.chat import render_chat
from tests.platform.inputs.chats import render, tokenizer


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
        "{{ dict.__init__.__globals__ }}",
        "{{ messages | tojson(default=raise_exception) }}",
        "{{ messages | tojson(cls=dict) }}",
        "{{ strftime_now.__globals__ }}",
        "{% set ns = namespace() %}{% set ns['__class__'] = 1 %}",
        "{{ self.__class__ }}{{ self._TemplateReference__context.environment }}",
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
        "{{ lipsum(n=10 ** 6) | length }}",
        "{% for a in range(99999) %}{{ messages | tojson(indent=99999) | length }}{% endfor %}",
        "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    ],
)
def test_endless_templates_are_stopped(template: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_renderer, "RENDER_SECONDS", 0.5)
        begun = time.monotonic()
        with pytest.raises(RequestError, match=r"stopped|memory|failed"):
            render(template)
        assert time.monotonic() - begun < 60
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
        "{{ messages | tojson(indent=10 ** 10) }}",
        "{{ raise_exception('a' * 10 ** 10) }}",
        "{{ ('x' * 100) | replace('', 'y' * 99999) | replace('', 'z' * 999) | length }}",
    ],
)
def test_memory_bombs_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_renderer, "RENDER_MEMORY", 200 << 20)
    render("warm")
    with pytest.raises(RequestError, match=r"memory|characters|stopped"):
        render(template)
    assert render("{{ messages | length }}") == "3"


def test_what_a_template_says_of_an_error_is_cut() -> None:
    with pytest.raises(RequestError) as refused:
        render("{{ raise_exception('a' * 10 ** 6) }}")
    assert len(str(refused.value)) < 3000


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
