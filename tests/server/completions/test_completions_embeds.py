"""Completions of prompts that come as embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM
from tests.server.api_answers import events, joined, post, refusal, saved
from tests.server.completions.helpers import DRAWN, GREEDY, PATH, PROMPT, PROMPTS, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.inference_mode()
def embedded(llm: LLM, text: str) -> torch.Tensor:
    return llm.llm_engine.executor.runner.model.embed(torch.tensor(ids_of(llm, text))).clone()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("how", [GREEDY, {**DRAWN, "n": 2}], ids=["greedy", "drawn"])
def test_they_answer_as_their_tokens_do(http: Any, llm: LLM, how: dict[str, Any]) -> None:
    expected = post(http, PATH, prompt=PROMPTS, logprobs=2, **how)
    rows = [saved(embedded(llm, prompt)) for prompt in PROMPTS]
    answer = post(http, PATH, prompt_embeds=rows, logprobs=2, **how)
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    (one,) = (post(http, PATH, prompt_embeds=rows[0], **GREEDY) for _ in range(1))
    assert texts(one) == texts(post(http, PATH, prompt=PROMPTS[0], **GREEDY))


def test_they_come_before_texts(http: Any, llm: LLM) -> None:
    """As they do in vLLM."""
    first, second = (texts(post(http, PATH, prompt=one, **GREEDY))[0] for one in PROMPTS[:2])
    answer = post(http, PATH, prompt=PROMPTS[0], prompt_embeds=saved(embedded(llm, PROMPTS[1])), **GREEDY)
    assert texts(answer) == [second, first]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for nothing in ("", [], None):
        answer = post(http, PATH, prompt=nothing, prompt_embeds=saved(embedded(llm, PROMPT)), **GREEDY)
        assert texts(answer) == [first]


def test_streams(http: Any, llm: LLM) -> None:
    rows = saved(embedded(llm, PROMPT)[None])
    (choice,) = joined(events(http, PATH, prompt_embeds=rows, **GREEDY)).values()
    assert choice["text"] == texts(post(http, PATH, prompt=PROMPT, **GREEDY))[0]


def test_shapes_and_ids(http: Any, llm: LLM) -> None:
    rows = saved(embedded(llm, PROMPT))
    answer = post(
        http, PATH, prompt_embeds=rows, max_tokens=20, guided_choice=["star", "circle"], return_token_ids=True
    )
    assert texts(answer)[0] in ("star", "circle")
    assert answer["choices"][0]["prompt_token_ids"] == [0] * len(ids_of(llm, PROMPT))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("AAAA", "is no file of torch.save"),
        ("%", "is no base64"),
        ("", "is no file of torch.save"),
        (saved(torch.zeros(3, 5)), "must be a dense float tensor"),
        (saved(torch.full((3, 192), torch.nan)), "infinite or no numbers"),
        (saved(torch.zeros(1, 192).expand(100_000, 192)), "context length"),
        (saved({"a": 1}), "not one tensor"),
        (saved(torch.zeros(3, dtype=torch.int64)), "torch.LongStorage"),
        ([saved(torch.zeros(3, 192)), "AAAA"], "is no file of torch.save"),
        ([saved(torch.zeros(1, 192))] * 300, "the limit is"),
    ],
    ids=["nothing", "no base64", "empty", "shape", "NaN", "long", "dict", "whole", "second", "many"],
)
def test_bad_rows_are_named(http: Any, rows: Any, message: str) -> None:
    error = refusal(http, PATH, prompt_embeds=rows, **GREEDY)
    assert message in error["message"] and len(error["message"]) < 400
    assert post(http, PATH, prompt=PROMPT, **GREEDY)["choices"]


@pytest.mark.parametrize("field", [{"echo": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 5}])
def test_what_tokens_alone_have_is_refused(http: Any, field: dict[str, Any]) -> None:
    error = refusal(http, PATH, prompt_embeds=saved(torch.zeros(3, 192)), **field, **GREEDY)
    assert error["param"] == next(iter(field)) and "is not served with prompt_embeds" in error["message"]
