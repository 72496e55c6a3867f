"""Chat completions: a server with a template and defaults of its own; what goes to templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM
from tests.server.api_answers import post, refusal
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.chat.helpers import KEYS, PATH, STORY, WHO

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = """{{- bos_token -}}
{%- for document in documents or [] -%} ({{ document['title'] }}: {{ document['text'] }}) {%- endfor -%}
{%- for message in messages -%} [{{ message['role'] }}] {{ message['content'] }} {%- endfor -%}
{{- word | default('') -}}
{%- if add_generation_prompt -%} [answer] {%- endif -%}"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    defaults = '{"temperature": 0, "max_tokens": 3}'
    options = [
        "--chat-template",
        str(file),
        "--response-role",
        "answer",
        "--max-logprobs",
        "-1",
        "--max-model-len",
        "256",
    ]
    with ServerProcess(*options, "--override-generation-config", defaults, **ONE_THREAD) as server:
        yield server


def test_a_servers_template(other: ServerProcess, llm: LLM) -> None:
    def prompt(**fields: Any) -> str:
        with other.http() as http:
            answer = post(http, PATH, messages=STORY[:2], return_token_ids=True, **fields)
        return llm.get_tokenizer().decode(answer["prompt_token_ids"])

    turns = "".join(f"[{message['role']}] {message['content']}" for message in STORY[:2])
    assert prompt() == f"<|bos|>{turns}[answer]"
    assert prompt(add_generation_prompt=False) == f"<|bos|>{turns}"
    assert prompt(chat_template_kwargs={"word": "now"}) == f"<|bos|>{turns}now[answer]"
    documents = [{"title": "one", "text": "a red star"}, {"title": "two", "text": "a hat"}]
    assert prompt(documents=documents) == f"<|bos|>(one: a red star)(two: a hat){turns}[answer]"


def test_a_servers_defaults(other: ServerProcess) -> None:
    with other.http() as http:
        answers = [post(http, PATH, messages=WHO, ignore_eos=True) for _ in range(2)]
        longer = post(http, PATH, messages=WHO, max_tokens=5, ignore_eos=True)
        completed = post(http, "/v1/completions", prompt="Once upon a time")
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["message"]["role"] == "answer"
    assert [one["usage"]["completion_tokens"] for one in (*answers, longer, completed)] == [3, 3, 5, 3]


def test_logprobs_of_the_whole_vocabulary(other: ServerProcess) -> None:
    with other.http() as http:
        chat = post(http, PATH, messages=WHO, logprobs=True, top_logprobs=-1, max_tokens=1)
        ids = {"logprobs": -1, "max_tokens": 1, "return_tokens_as_token_ids": True}
        text = post(http, "/v1/completions", prompt="Once upon a time", **ids)
        assert refusal(http, "/v1/completions", prompt="a" * 10, max_tokens=1, logprobs=-2)["param"] == "logprobs"
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == len(text["choices"][0]["logprobs"]["top_logprobs"][0]) == 1029
    assert sum(2.718281828459045 ** top["logprob"] for top in entry["top_logprobs"]) == pytest.approx(1)


def test_an_answer_is_no_longer_than_the_model(other: ServerProcess) -> None:
    with other.http() as http:
        answer = post(http, PATH, messages=WHO, max_tokens=10**6, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "variables": ({"messages": WHO, "chat_template_kwargs": KEYS}, "chat_template_kwargs"),
    "values of a variable": ({"messages": WHO, "chat_template_kwargs": {"a": [[1] * 50_000]}}, "chat_template_kwargs"),
    "a text": ({"messages": WHO, "chat_template_kwargs": {"a": "x" * (3 << 20)}}, "chat_template_kwargs"),
    "keys of a message": ({"messages": [{**WHO[0], **KEYS}]}, "messages"),
    "a value of a message": ({"messages": [{**WHO[0], "name": [1] * 50_000}]}, "messages"),
    "keys of a part": ({"messages": [{"role": "user", "content": [{"type": "text", **KEYS}]}]}, "messages"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_is_too_much_for_a_template_is_refused_before_it_is_written_out(http: Any, case: str) -> None:
    """Everybody waits while it is: 300,000 variables held the server for three seconds."""
    body, field = TOO_MUCH[case]
    for path in (PATH, "/tokenize"):
        more = {} if path == "/tokenize" else {"max_tokens": 1}
        error = refusal(http, path, **body, **more)
        assert error["param"] == field and "too much for a chat template" in error["message"]


def test_documents_count_too(http: Any) -> None:
    documents = [{"text": "a"}] * 25_000
    assert "too much" in refusal(http, PATH, messages=WHO, documents=documents)["message"]
    assert post(http, PATH, messages=WHO, documents=documents[:5000], max_tokens=1)["choices"]
