"""Completions: when it ends; which tokens."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion

from quire import LLM, BeamSearchParams
from tests.server.api_answers import events, joined, offline, post, strict
from tests.server.completions.helpers import DRAWN, GREEDY, MODEL, PATH, PROMPT, PROMPTS, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 2  # <|end|>


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", [" star", ["zebra", "tar na"], "e"])
def test_stop_strings(http: Any, llm: LLM, stop: Any, keep: bool) -> None:
    params = {**GREEDY, "stop": stop, "include_stop_str_in_output": keep}
    want = offline(llm, PROMPT, **params).outputs[0]
    (choice,) = post(http, PATH, prompt=PROMPT, **params)["choices"]
    streamed = joined(events(http, PATH, prompt=PROMPT, **params))[0]
    assert choice["text"] == streamed["text"] == want.text
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
    assert choice["stop_reason"] == streamed["stop_reason"] == want.stop_reason
    assert choice["text"].endswith(str(want.stop_reason)) == keep


def test_stop_token_ids(http: Any, llm: LLM) -> None:
    tokens = offline(llm, PROMPT, **GREEDY).outputs[0].token_ids
    (choice,) = post(http, PATH, prompt=PROMPT, stop_token_ids=[tokens[4]], return_token_ids=True, **GREEDY)["choices"]
    assert choice["token_ids"] == list(tokens[:5])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[4])


def test_the_models_end_token_ends_it(http: Any, llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 400}
    want = offline(llm, PROMPT, **params).outputs[0]
    answer = post(http, PATH, prompt=PROMPT, **params)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want.text, "stop", None)
    assert want.token_ids[-1] == EOS and answer["usage"]["completion_tokens"] == len(want.token_ids) < 400


def test_ignore_eos_goes_past_it(http: Any, llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
    answer = post(http, PATH, prompt=PROMPT, return_token_ids=True, **params)
    assert answer["choices"][0]["token_ids"] == list(offline(llm, PROMPT, **params).outputs[0].token_ids)
    assert EOS in answer["choices"][0]["token_ids"][:-1] and answer["usage"]["completion_tokens"] == 150


def test_min_tokens_holds_the_end_back(http: Any) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "logit_bias": {str(EOS): 100}}
    assert post(http, PATH, **body)["usage"]["completion_tokens"] == 1
    assert post(http, PATH, min_tokens=7, **body)["usage"]["completion_tokens"] == 8


def test_max_tokens_is_sixteen_by_default(http: Any) -> None:
    assert post(http, PATH, prompt=PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_a_seed_repeats_the_draws(client: OpenAI, llm: LLM) -> None:
    texts = [client.completions.create(model=MODEL, prompt=PROMPT, **DRAWN).choices[0].text for _ in range(2)]
    other = client.completions.create(model=MODEL, prompt=PROMPT, **{**DRAWN, "seed": 12}).choices[0].text
    assert texts == [offline(llm, PROMPT, **DRAWN).outputs[0].text] * 2
    assert other != texts[0]


def test_without_a_seed_draws_differ(client: OpenAI) -> None:
    drawn = {"temperature": 1.0, "max_tokens": 24}
    assert len({client.completions.create(model=MODEL, prompt=PROMPT, **drawn).choices[0].text for _ in range(4)}) > 1


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"min_p": 0.2},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"temperature": 1.7},
        {"top_p": 0.4},
        {"skip_special_tokens": False, "temperature": 0, "max_tokens": 100},
        {"spaces_between_special_tokens": False},
        {"bad_words": [" star", " purple"]},
    ],
)
def test_parameters_reach_the_sampler(http: Any, llm: LLM, params: dict[str, Any]) -> None:
    asked = {**DRAWN, **params}
    (choice,) = post(http, PATH, prompt=PROMPT, return_token_ids=True, **asked)["choices"]
    want = offline(llm, PROMPT, **asked).outputs[0]
    assert (choice["text"], choice["token_ids"]) == (want.text, list(want.token_ids))


def test_logit_bias_decides(http: Any, llm: LLM) -> None:
    (token,) = ids_of(llm, " star")[1:]
    body = {"logit_bias": {str(token): 100}, "temperature": 0, "max_tokens": 3, "return_token_ids": True}
    assert post(http, PATH, prompt=PROMPT, **body)["choices"][0]["token_ids"] == [token] * 3
    likeliest = offline(llm, PROMPT, **GREEDY).outputs[0].token_ids[0]
    body["logit_bias"] = {str(likeliest): -100}
    assert post(http, PATH, prompt=PROMPT, **body)["choices"][0]["token_ids"][0] != likeliest


def test_allowed_token_ids(http: Any) -> None:
    allowed = [300, 301, 302]
    body = {"allowed_token_ids": allowed, "max_tokens": 20, "seed": 1, "return_token_ids": True}
    tokens = post(http, PATH, prompt=PROMPT, **body)["choices"][0]["token_ids"]
    assert len(tokens) == 20 and set(tokens) <= set(allowed)


def test_bad_words_do_not_come(http: Any) -> None:
    plain = post(http, PATH, prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    text = post(http, PATH, prompt=PROMPT, bad_words=[" star", " purple"], **GREEDY)["choices"][0]["text"]
    assert " star" in plain and " purple" in plain
    assert " star" not in text and " purple" not in text


@pytest.mark.parametrize("width", [1, 3])
def test_beams_are_those_of_beam_search(http: Any, llm: LLM, width: int) -> None:
    for length_penalty in (1.0, 0.0):
        params = BeamSearchParams(width, 12, length_penalty=length_penalty)
        beams = [llm.beam_search([prompt], params)[0] for prompt in PROMPTS]
        fields = {"use_beam_search": True, "n": width, "max_tokens": 12, "length_penalty": length_penalty}
        answer = post(http, PATH, prompt=PROMPTS, return_token_ids=True, **fields)
        want = [(beams[p].sequences[b], len(ids_of(llm, PROMPTS[p]))) for p in range(3) for b in range(width)]
        assert [c["token_ids"] for c in answer["choices"]] == [s.tokens[begin:] for s, begin in want]
        assert [c["index"] for c in answer["choices"]] == list(range(3 * width))
        decode = llm.get_tokenizer().decode
        texts = [decode(s.tokens[begin:], skip_special_tokens=True) for s, begin in want]
        assert [c["text"] for c in answer["choices"]] == texts
        assert answer["usage"]["completion_tokens"] == sum(len(s.tokens) - begin for s, begin in want)
        strict(Completion, answer)
