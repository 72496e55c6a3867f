"""Other routes: tokens."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM
from tests.server.api_answers import post, refusal
from tests.server.routes.helpers import CHAT, COMPLETIONS, PROMPT, WHO

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("text", [PROMPT, "Ein Stern, ein Kreis: été, 星, \N{GRINNING FACE}", " ", "<|image|><|end|>"])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_back(http: Any, llm: LLM, text: str, special: bool) -> None:
    answer = post(http, "/tokenize", prompt=text, add_special_tokens=special)
    want = llm.get_tokenizer()(text, add_special_tokens=special)["input_ids"]
    assert answer == {"count": len(want), "max_model_len": 2048, "tokens": want, "token_strs": None}
    back = post(http, "/detokenize", tokens=answer["tokens"])["prompt"]
    assert back == ("<|bos|>" if special else "") + text


def test_the_tokens_are_those_that_run(http: Any) -> None:
    tokens = post(http, "/tokenize", prompt=PROMPT)["tokens"]
    ran = post(http, COMPLETIONS, prompt=PROMPT, return_token_ids=True, max_tokens=1)
    assert ran["choices"][0]["prompt_token_ids"] == tokens
    tokens = post(http, "/tokenize", messages=WHO)["tokens"]
    assert post(http, CHAT, messages=WHO, return_token_ids=True, max_tokens=1)["prompt_token_ids"] == tokens


def test_a_conversations_tokens(http: Any) -> None:
    def text(**fields: Any) -> str:
        return post(http, "/detokenize", tokens=post(http, "/tokenize", **fields)["tokens"])["prompt"]

    assert text(messages=WHO) == "<|bos|><|user|>Who are you?<|end|><|assistant|>"
    assert text(messages=WHO, add_generation_prompt=False) == "<|bos|><|user|>Who are you?<|end|>"
    opened = [*WHO, {"role": "assistant", "content": "I"}]
    left_open = text(messages=opened, continue_final_message=True, add_generation_prompt=False)
    assert left_open == "<|bos|><|user|>Who are you?<|end|><|assistant|>I"


def test_token_strings(http: Any, llm: LLM) -> None:
    answer = post(http, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert answer["token_strs"] == llm.get_tokenizer().convert_ids_to_tokens(answer["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": WHO}, "prompt"),
        ("/tokenize", {"messages": WHO, "chat_template": "a"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [1029]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokens_that_cannot_be(http: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(http, path, **body)["param"] == param
