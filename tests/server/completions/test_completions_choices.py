"""Completions: several answers."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from quire import LLM
from quire.platform.outputs.outputs import CompletionOutput
from tests.server.api_answers import offline, refusal
from tests.server.completions.helpers import DRAWN, MODEL, PATH, PROMPT, PROMPTS

pytestmark = pytest.mark.usefixtures("one_thread")


def mean_logprob(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob / len(output.token_ids)


def test_n_answers_to_each_prompt(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[:2], n=3, **DRAWN)
    want = [out.text for prompt in PROMPTS[:2] for out in offline(llm, prompt, n=3, **DRAWN).outputs]
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(want)) > 3


def test_best_of_answers_those_of_the_best_mean_logprob(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=6, **DRAWN)
    drawn = offline(llm, PROMPT, n=6, logprobs=0, **DRAWN).outputs
    best = sorted(drawn, key=mean_logprob, reverse=True)[:2]
    assert [choice.text for choice in answer.choices] == [out.text for out in best]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(out.token_ids) for out in drawn)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True, "x": True}, "stream": True}, "stream_options"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "n": 200, "max_tokens": 1}, "n"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_an_impossible_value_names_its_field(http: Any, fields: dict[str, Any], param: str, as_list: bool) -> None:
    error = refusal(http, PATH, prompt=PROMPTS if as_list else PROMPT, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_the_client_raises_its_own_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert (caught.value.param, caught.value.status_code) == ("temperature", 400)
