"""Every row's published format of chat comes out of quire's own path: the text and the tokens, BOS once.

Checkpoints store templates in several ways (`chat/format.py`); each format's folder has its family's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestError, SamplingParams, registry
from quire.platform.inputs.chat import render_chat
from quire.platform.inputs.tokenizer import encode_prompt, load_tokenizer
from quire.registry.row import TEXT
from tests.models import rows, tiny
from tests.models.chat.format import ALONE, TALK, Case, ChatFormat
from tests.models.chat.formats import FORMATS
from tests.models.chat.rows import ROWS
from tests.server.api_answers import post, refusal
from tests.server.api_server import LocalServer

CASES = [(name, number) for name, one in FORMATS.items() for number in range(len(one.cases))]
REFUSED = [(name, number) for name, one in FORMATS.items() for number in range(len(one.refused))]
TEXT_ONLY = [row.architecture for row in registry.BUILT_IN if row.capabilities == TEXT]
PATH = "/v1/chat/completions"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @cache
    def load(name: str) -> Any:
        return load_tokenizer(FORMATS[name].save(tmp_path_factory.mktemp(name)))

    return load


def options(one: ChatFormat, case: Case) -> dict[str, Any]:
    """Of `render_chat`. Where checkpoints have no template, users give one."""
    return {**({"chat_template": one.source()} if one.stored is None else {}), **case.options}


def by_transformers(tokenizer: Any, messages: Any, template_kwargs: Any = None, **given: Any) -> str:
    """The text of `render_chat`'s options."""
    given = {"add_generation_prompt": True, **given, **(template_kwargs or {})}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **given))


def expected(case: Case) -> set[str]:
    """Its text, which may have today's date in it."""
    return {case.expected(datetime.now())}


def test_every_row_has_a_format_or_a_reason() -> None:
    assert set(TEXT_ONLY) <= set(ROWS)
    formats = [name for names in ROWS.values() if not isinstance(names, str) for name in names]
    assert set(formats) <= set(FORMATS)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_conversation_is_written_as_published(tokenizer_of: Callable[[str], Any], name: str, number: int) -> None:
    one, tokenizer = FORMATS[name], tokenizer_of(name)
    case = one.cases[number]
    allowed = expected(case)
    chat = render_chat(tokenizer, case.messages, **options(one, case))
    assert chat.text in allowed | expected(case)
    assert chat.token_ids == one.ids(chat.text)
    if one.takes_texts and all(isinstance(message["content"], str) for message in case.messages):
        assert chat.text == by_transformers(tokenizer, case.messages, **options(one, case))
    if one.bos is not None and chat.text.startswith(one.bos):
        assert encode_prompt(tokenizer, chat.text[len(one.bos) :]) == chat.token_ids  # that of a text is not doubled


@pytest.mark.parametrize(("name", "number"), REFUSED)
def test_a_template_refuses_in_its_own_words(tokenizer_of: Callable[[str], Any], name: str, number: int) -> None:
    refused = FORMATS[name].refused[number]
    with pytest.raises(RequestError) as caught:
        render_chat(tokenizer_of(name), refused.messages)
    assert refused.says in str(caught.value)


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.stored is None])
def test_without_a_template_it_is_said_how_to_give_one(tokenizer_of: Callable[[str], Any], name: str) -> None:
    with pytest.raises(RequestError, match=r"chat_template=.*--chat-template.*generate\(\).*/v1/completions"):
        render_chat(tokenizer_of(name), ALONE)


def test_a_name_that_no_template_has_is_refused(tokenizer_of: Callable[[str], Any]) -> None:
    with pytest.raises(RequestError, match=r"'raq'.*default, rag, tool_use"):
        render_chat(tokenizer_of("cohere"), ALONE, chat_template="raq")


def save_model(architecture: str, one: ChatFormat, folder: Path) -> Path:
    """The row's first variant with a tokenizer of such a format."""
    row = rows.all_rows().get(architecture)
    variant = row.first if row else next(iter(tiny.TABLE[architecture][2]))
    assert len(one.tokens) + len(one.characters()) <= tiny.VOCAB
    return one.save(tiny.build(architecture, variant, folder))


def row_of(architecture: str) -> str:
    """The architecture whose data file has the row."""
    return next((name for name, row in rows.all_rows().items() if architecture in row.aliases), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in TEXT_ONLY if not isinstance(ROWS[name], str)])
def test_a_row_answers_a_chat(architecture: str, tmp_path: Path) -> None:
    one = FORMATS[ROWS[architecture][0]]
    llm = LLM(str(save_model(row_of(architecture), one, tmp_path)), dtype="float32")
    case = one.cases[0]
    given = {"chat_template": one.source()} if one.stored is None else {}
    allowed = expected(case)
    (output,) = llm.chat([case.messages], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), **given)
    assert output.prompt in allowed | expected(case) and output.prompt_token_ids == one.ids(output.prompt)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in TEXT_ONLY if isinstance(ROWS[name], str)])
def test_a_row_that_only_continues_text_says_so(architecture: str, tmp_path: Path) -> None:
    one = FORMATS["baichuan"]  # a tokenizer without a template
    llm = LLM(str(save_model(architecture, one, tmp_path)), dtype="float32")
    with pytest.raises(RequestError, match=r"only continue text: pass chat_template=.*generate\(\)"):
        llm.chat([ALONE])
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (output,) = llm.chat([ALONE], params, chat_template=one.source())
    assert output.prompt == "<reserved_106>Is 1 < é?<reserved_107>"
    (output,) = llm.generate(["Is 1 < é?"], params)
    assert output.prompt_token_ids == one.ids("<s>Is 1 < é?")


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_the_api_writes_it_and_refuses_in_its_words(name: str, tmp_path: Path) -> None:
    one = FORMATS[name]
    with LocalServer({"model": str(save_model("LlamaForCausalLM", one, tmp_path))}) as server, server.http() as http:
        for case in one.cases:
            if "tools" in case.options:  # which the API refuses
                continue
            fields = dict(case.options)
            kwargs = fields.pop("template_kwargs", None)
            answer = post(
                http, PATH, messages=list(case.messages), max_tokens=1, return_token_ids=True,
                chat_template_kwargs=kwargs, **fields,
            )  # fmt: skip
            assert answer["prompt_token_ids"] == one.ids(case.text)
        for refused in one.refused:
            assert refused.says in refusal(http, PATH, messages=list(refused.messages))["message"]


def test_the_api_without_a_template_tells_the_way_out(tmp_path: Path) -> None:
    one = FORMATS["baichuan"]
    path = str(save_model("GPT2LMHeadModel", one, tmp_path))
    with LocalServer({"model": path}) as server, server.http() as http:
        said = refusal(http, PATH, messages=list(ALONE))["message"]
        assert "--chat-template" in said and "/v1/completions" in said
        assert post(http, "/v1/completions", prompt="Why?", max_tokens=1)["choices"]
    with LocalServer({"model": path}, chat_template=one.source()) as server, server.http() as http:
        answer = post(http, PATH, messages=list(TALK), max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"] == one.ids(one.cases[0].text)
