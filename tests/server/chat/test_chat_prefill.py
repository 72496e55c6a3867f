"""Chat completions: how the answer begins."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM
from tests.server.api_answers import events, joined, post
from tests.server.chat.helpers import GREEDY, PATH, WHO

pytestmark = pytest.mark.usefixtures("one_thread")

OPEN = [*WHO, {"role": "assistant", "content": "I am"}]


def test_the_last_message_may_be_continued(http: Any, llm: LLM) -> None:
    tokens = post(http, "/tokenize", messages=OPEN, continue_final_message=True, add_generation_prompt=False)["tokens"]
    answer = post(http, PATH, messages=OPEN, continue_final_message=True, return_token_ids=True, **GREEDY)
    assert answer["prompt_token_ids"] == tokens
    decode = llm.get_tokenizer().decode
    assert decode(tokens) == "<|bos|><|user|>Who are you?<|end|><|assistant|>I am"
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith(" ") and not text.startswith("I am")
    echoed = post(http, PATH, messages=OPEN, continue_final_message=True, echo=True, **GREEDY)
    assert echoed["choices"][0]["message"]["content"] == "I am" + text
    chunks = events(http, PATH, messages=OPEN, continue_final_message=True, echo=True, **GREEDY)
    assert joined(chunks)[0]["text"] == "I am" + text


def test_echo_repeats_no_other_roles_message(http: Any) -> None:
    plain = post(http, PATH, messages=WHO, **GREEDY)["choices"]
    assert post(http, PATH, messages=WHO, echo=True, **GREEDY)["choices"] == plain


def test_without_a_generation_prompt_the_answer_is_not_opened(http: Any, llm: LLM) -> None:
    answer = post(http, PATH, messages=WHO, add_generation_prompt=False, return_token_ids=True, max_tokens=1)
    assert llm.get_tokenizer().decode(answer["prompt_token_ids"]) == "<|bos|><|user|>Who are you?<|end|>"
