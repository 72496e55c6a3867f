"""Completions: logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from quire import LLM
from tests.server.api_answers import offline, post
from tests.server.completions.helpers import DRAWN, GREEDY, MODEL, PATH, PROMPT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("most", [0, 1, 3])
def test_logprobs_are_the_engines(client: OpenAI, llm: LLM, most: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=most, **DRAWN)
    shown, want = answer.choices[0].logprobs, offline(llm, PROMPT, logprobs=most, **DRAWN).outputs[0]
    assert shown is not None and want.logprobs is not None
    chosen = [entries[token] for token, entries in zip(want.token_ids, want.logprobs, strict=True)]
    assert shown.tokens == [one.decoded_token for one in chosen]
    assert shown.token_logprobs == [one.logprob for one in chosen]
    assert "".join(shown.tokens) == answer.choices[0].text
    assert shown.text_offset == [sum(map(len, shown.tokens[:place])) for place in range(len(shown.tokens))]
    # The likeliest, and the one that was drawn.
    for top, entries, one in zip(shown.top_logprobs, want.logprobs, chosen, strict=True):
        assert top == {e.decoded_token: e.logprob for e in entries.values()}
        assert one.decoded_token in top and most <= len(top) <= most + 1


def test_return_tokens_as_token_ids(http: Any, llm: LLM) -> None:
    want = offline(llm, PROMPT, logprobs=1, **GREEDY).outputs[0].token_ids
    (choice,) = post(http, PATH, prompt=PROMPT, logprobs=1, return_tokens_as_token_ids=True, **GREEDY)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in want]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[f"token_id:{token}"] for token in want]


def test_prompt_logprobs_have_vllms_form(http: Any, llm: LLM) -> None:
    want = offline(llm, PROMPT, prompt_logprobs=1, **GREEDY).prompt_logprobs
    (choice,) = post(http, PATH, prompt=PROMPT, prompt_logprobs=1, **GREEDY)["choices"]
    assert want is not None and choice["prompt_logprobs"] == [
        entries
        and {
            str(token): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in entries.items()
        }
        for entries in want
    ]
    assert choice["logprobs"] is None
