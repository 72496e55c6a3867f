"""Completions: prompts; echo."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from quire import LLM
from tests.server.api_answers import events, offline, post, refusal
from tests.server.completions.helpers import GREEDY, LONG, MODEL, PATH, PROMPT, PROMPTS, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_text_is_continued(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    want = offline(llm, PROMPT, **GREEDY).outputs[0]
    assert (answer.object, answer.model, len(answer.choices)) == ("text_completion", MODEL, 1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (want.text, "length")
    assert answer.id.startswith("cmpl-")


def test_the_model_may_be_left_out(http: Any, llm: LLM) -> None:
    answer = post(http, PATH, prompt=PROMPT, **GREEDY)
    assert answer["model"] == MODEL
    assert answer["choices"][0]["text"] == offline(llm, PROMPT, **GREEDY).outputs[0].text


def test_texts_are_continued_each_on_its_own(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPTS, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [offline(llm, p, **GREEDY).outputs[0].text for p in PROMPTS]


def test_token_ids_are_continued(client: OpenAI, llm: LLM) -> None:
    ids = ids_of(llm, PROMPT)
    answer = client.completions.create(model=MODEL, prompt=ids, **GREEDY)
    assert answer.choices[0].text == offline(llm, PROMPT, **GREEDY).outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


def test_lists_of_token_ids_are_continued_each_on_its_own(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=[ids_of(llm, p) for p in PROMPTS], **GREEDY)
    assert [choice.text for choice in answer.choices] == [offline(llm, p, **GREEDY).outputs[0].text for p in PROMPTS]


@pytest.mark.parametrize("model", ["french", "shout"])
def test_an_adapter_by_its_name(client: OpenAI, llm: LLM, model: str) -> None:
    prompt = "<|user|>Who are you?<|end|><|assistant|>"
    answer = client.completions.create(model=model, prompt=prompt, **GREEDY)
    assert answer.model == model
    assert answer.choices[0].text == offline(llm, prompt, model, **GREEDY).outputs[0].text
    assert answer.choices[0].text != offline(llm, prompt, **GREEDY).outputs[0].text


@pytest.mark.parametrize("prompt", [[], [[]], None])
def test_an_empty_prompt_is_refused(http: Any, prompt: Any) -> None:
    assert "empty" in refusal(http, PATH, prompt=prompt)["message"]


def test_an_empty_text_is_what_the_tokenizer_puts_around_it(http: Any) -> None:
    for prompt in ("", [""]):
        assert post(http, PATH, prompt=prompt, return_token_ids=True)["choices"][0]["prompt_token_ids"] == [1]


@pytest.mark.parametrize("prompt", [[10**6], [-1], [PROMPT, [5]], [1.5], {"text": "x"}, 7])
def test_what_is_no_prompt_is_refused(http: Any, prompt: Any) -> None:
    assert "prompt" in refusal(http, PATH, prompt=prompt)["message"]


def test_a_prompt_that_cannot_fit_is_refused(http: Any) -> None:
    assert "2048" in refusal(http, PATH, prompt="a star " * 3000)["message"]
    assert "2048" in refusal(http, PATH, prompt="a" * 10**6)["message"]


def test_too_many_prompts_are_refused(http: Any) -> None:
    assert refusal(http, PATH, prompt=["a"] * 257)["param"] == "prompt"


def test_add_special_tokens(http: Any, llm: LLM) -> None:
    ids = ids_of(llm, PROMPT)
    for add, want in ((True, ids), (False, ids[1:])):
        answer = post(http, PATH, prompt=PROMPT, add_special_tokens=add, return_token_ids=True, **GREEDY)
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == want
        expected = offline(llm, {"prompt_token_ids": want}, **GREEDY).outputs[0]
        assert choice["token_ids"] == list(expected.token_ids)
    assert post(http, PATH, prompt=ids, add_special_tokens=True, **GREEDY)["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("most", [1, 3, 2048, -1])
def test_truncate_prompt_tokens_keeps_the_last(http: Any, llm: LLM, most: int) -> None:
    ids = ids_of(llm, LONG)
    want = ids[-most:] if most > 0 else ids
    answer = post(http, PATH, prompt=LONG, truncate_prompt_tokens=most, return_token_ids=True, **GREEDY)
    assert answer["choices"][0]["prompt_token_ids"] == want
    assert answer["choices"][0]["token_ids"] == list(
        offline(llm, {"prompt_token_ids": want}, **GREEDY).outputs[0].token_ids
    )


def test_truncate_prompt_tokens_makes_room_for_the_answer(http: Any) -> None:
    ids = [5 + number % 500 for number in range(3000)]
    answer = post(http, PATH, prompt=ids, truncate_prompt_tokens=-1, max_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-2045:]


def test_echo_repeats_the_prompt(http: Any, llm: LLM) -> None:
    text = offline(llm, PROMPT, **GREEDY).outputs[0].text
    answer = post(http, PATH, prompt=PROMPT, echo=True, **GREEDY)
    assert answer["choices"][0]["text"] == PROMPT + text
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 24


def test_echo_decodes_a_prompt_of_token_ids(http: Any, llm: LLM) -> None:
    ids = ids_of(llm, PROMPT)[1:]
    answer = post(http, PATH, prompt=ids, echo=True, **GREEDY)
    assert answer["choices"][0]["text"].startswith(PROMPT)


def test_echo_with_logprobs_has_the_prompts(http: Any, llm: LLM) -> None:
    want = offline(llm, PROMPT, logprobs=2, prompt_logprobs=2, **GREEDY)
    (choice,) = post(http, PATH, prompt=PROMPT, echo=True, logprobs=2, **GREEDY)["choices"]
    shown = choice["logprobs"]
    assert len({len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    ids = [*want.prompt_token_ids, *want.outputs[0].token_ids]
    assert shown["tokens"] == [llm.get_tokenizer().decode([token]) for token in ids]
    entries = [*(want.prompt_logprobs or [])[1:], *(want.outputs[0].logprobs or [])]
    assert shown["token_logprobs"] == [None, *(e[token].logprob for token, e in zip(ids[1:], entries, strict=True))]
    assert shown["top_logprobs"][0] is None and all(2 <= len(top) <= 3 for top in shown["top_logprobs"][1:])
    # The text begins behind BOS, which it does not show.
    for token, offset in list(zip(shown["tokens"], shown["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_the_prompt(http: Any, llm: LLM, stream: bool) -> None:
    want = offline(llm, PROMPT, prompt_logprobs=1, max_tokens=1)
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    if stream:
        *chunks, last = events(http, PATH, stream_options={"include_usage": True}, **body)
        (choice,), usage = [c["choices"][0] for c in chunks], last["usage"]
    else:
        answer = post(http, PATH, **body)
        (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    scores = [e[token].logprob for token, e in zip(want.prompt_token_ids[1:], want.prompt_logprobs[1:], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == [None, *scores]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(want.prompt_token_ids), 0)


def test_nothing_to_generate_and_nothing_to_echo_is_refused(http: Any) -> None:
    assert refusal(http, PATH, prompt=PROMPT, max_tokens=0)["param"] == "max_tokens"
