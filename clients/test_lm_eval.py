"""lm-eval's local-completions, with the tokenizer's files and without the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MODEL
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from openai import OpenAI

QUESTION = "<|user|>There is a red star and a blue circle. What color is the star?<|end|><|assistant|>"
ANSWERS = ("Red.", "Blue.", "Green.")


@pytest.fixture(scope="module")
def model(url: str, tokenizer: Path) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{url}/completions", model=MODEL, tokenizer=str(tokenizer), tokenizer_backend="huggingface",
        max_length=1000, num_concurrent=2, max_retries=1,
    )  # fmt: skip


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_loglikelihood(model, url: str) -> None:
    """By the package, and by the logprobs that the answer itself comes with."""
    found = model.loglikelihood(asked("loglikelihood", *((QUESTION, answer) for answer in ANSWERS)))
    values = [value for value, _ in found]
    assert values[0] > max(values[1:]) and [greedy for _, greedy in found] == [True, False, False]
    client = OpenAI(base_url=url, api_key="none")
    done = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=2, temperature=0, logprobs=1,
        extra_body={"ignore_eos": True, "add_special_tokens": False},  # lm-eval sends token ids, without a <|bos|>
    )  # fmt: skip
    tokens = done.choices[0].logprobs
    spelled = [i for i in range(len(tokens.tokens)) if "".join(tokens.tokens[: i + 1]) == ANSWERS[0]]
    assert spelled and values[0] == pytest.approx(sum(tokens.token_logprobs[: spelled[0] + 1]), abs=0.01)


def test_generate_until(model) -> None:
    settings = {"until": ["."], "max_gen_toks": 8, "temperature": 0}
    assert model.generate_until(asked("generate_until", (QUESTION, settings)))[0].startswith("Red")


def test_the_servers_own_tokenizer(model, url: str) -> None:
    """tokenizer_backend=remote asks /tokenizer_info and /tokenize."""
    remote = LocalCompletionsAPI(
        base_url=f"{url}/completions", model=MODEL, tokenizer_backend="remote", max_length=1000, max_retries=1
    )
    pairs = [(QUESTION, answer) for answer in ANSWERS]
    found, expected = (one.loglikelihood(asked("loglikelihood", *pairs)) for one in (remote, model))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=0.01)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
