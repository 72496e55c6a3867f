"""Chat completions: parameters."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from quire import LLM, BeamSearchParams
from tests.server.api_answers import conversed, post, refusal, strict
from tests.server.chat.helpers import DRAWN, GREEDY, LOOK, MODEL, PATH, SEEN, STORY, TOLD, WHO

pytestmark = pytest.mark.usefixtures("one_thread")


def test_n_answers(client: OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=TOLD, n=4, **DRAWN)
    want = [out.text for out in conversed(llm, TOLD, n=4, **DRAWN).outputs]
    assert [choice.message.content for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(want)) > 1


def test_best_of(http: Any, llm: LLM) -> None:
    drawn = conversed(llm, TOLD, n=5, logprobs=0, **DRAWN).outputs
    best = sorted(drawn, key=lambda out: -(out.cumulative_logprob or 0) / len(out.token_ids))[:2]
    answer = post(http, PATH, messages=TOLD, n=2, best_of=5, **DRAWN)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [out.text for out in best]


@pytest.mark.parametrize("most", [None, 0, 3])
def test_logprobs_are_the_engines(client: OpenAI, llm: LLM, most: int | None) -> None:
    fields = {} if most is None else {"top_logprobs": most}
    answer = client.chat.completions.create(model=MODEL, messages=TOLD, logprobs=True, **fields, **DRAWN)
    want = conversed(llm, TOLD, logprobs=most or 0, **DRAWN).outputs[0]
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert want.logprobs is not None
    for shown, token, entries in zip(answer.choices[0].logprobs.content, want.token_ids, want.logprobs, strict=True):
        assert (shown.token, shown.logprob) == (entries[token].decoded_token, entries[token].logprob)
        assert bytes(shown.bytes or []) == entries[token].token_bytes
        likeliest = sorted(entries.values(), key=lambda entry: entry.rank or 0)[: most or 0]
        assert [(top.token, top.logprob) for top in shown.top_logprobs] == [
            (entry.decoded_token, entry.logprob) for entry in likeliest
        ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"temperature": 1e9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": LOOK, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_an_impossible_value_names_its_field(http: Any, fields: dict[str, Any], param: str) -> None:
    error = refusal(http, PATH, **{"messages": WHO, **fields})
    assert error["param"] == param and error["message"].startswith(param)


def test_the_three_ways_to_end(http: Any) -> None:
    length = post(http, PATH, messages=WHO, max_completion_tokens=3, **GREEDY)
    assert (length["choices"][0]["finish_reason"], length["usage"]["completion_tokens"]) == ("length", 3)
    assert post(http, PATH, messages=WHO, max_tokens=3, **GREEDY)["choices"] == length["choices"]
    ended = post(http, PATH, messages=WHO, **GREEDY)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    stopped = post(http, PATH, messages=LOOK, stop=["blue"], **GREEDY)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "blue")
    assert stopped["message"]["content"] == SEEN.partition("blue")[0]


def test_truncated_conversations(http: Any) -> None:
    whole = post(http, PATH, messages=STORY, return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    cut = post(http, PATH, messages=STORY, return_token_ids=True, max_tokens=1, truncate_prompt_tokens=5)
    assert cut["prompt_token_ids"] == whole[-5:]


def test_prompt_logprobs(http: Any, llm: LLM) -> None:
    want = conversed(llm, WHO, prompt_logprobs=1, **GREEDY).prompt_logprobs
    shown = post(http, PATH, messages=WHO, prompt_logprobs=1, **GREEDY)["prompt_logprobs"]
    assert want is not None and shown[0] is None and len(shown) == len(want)
    for entries, others in zip(shown[1:], want[1:], strict=True):
        assert others is not None
        assert {int(token): entry["logprob"] for token, entry in entries.items()} == {
            token: entry.logprob for token, entry in others.items()
        }


def test_beams(http: Any, llm: LLM) -> None:
    params = BeamSearchParams(3, 10)
    tokens = post(http, "/tokenize", messages=TOLD)["tokens"]
    want = llm.beam_search([{"prompt_token_ids": tokens}], params)[0].sequences
    answer = post(http, PATH, messages=TOLD, use_beam_search=True, n=3, max_tokens=10, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [beam.tokens[len(tokens) :] for beam in want]
    strict(ChatCompletion, answer)


def test_processor_settings_reach_the_pictures(http: Any) -> None:
    def first(**settings: Any) -> Any:
        body = {"messages": LOOK, "logprobs": True, "max_tokens": 1, "mm_processor_kwargs": settings}
        return post(http, PATH, **body, **GREEDY)["choices"][0]["logprobs"]

    assert first() != first(image_mean=[0.9, 0.9, 0.9])
    assert "nonsense" in refusal(http, PATH, messages=LOOK, mm_processor_kwargs={"nonsense": 1})["message"]
    for name, value in (("image_std", [1e-30] * 3), ("image_mean", 1e308), ("rescale_factor", 1e300)):
        error = refusal(http, PATH, messages=LOOK, mm_processor_kwargs={name: value})
        assert error["param"] == "mm_processor_kwargs" and name in error["message"]
    error = refusal(http, PATH, messages=LOOK, mm_processor_kwargs={"size": {"height": 7071, "width": 7071}})
    assert "the tower takes [3, 96, 96]" in error["message"] and "mm_processor_kwargs has size" in error["message"]
