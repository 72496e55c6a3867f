"""Promise 1 with shapes: the same tokens and logprobs alone, in a crowd, in pieces, preempted, in another process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.platform.sampling.structured.shapes import LIST, PERSON, SHAPES, params, prompts

REQUESTS = 40
Answer = list[tuple[list[int], str, Any, Any]]


def answers(llm: LLM, chosen: list[int]) -> dict[int, Answer]:
    batch = prompts(REQUESTS)
    outputs = llm.generate([batch[i] for i in chosen], [params(i) for i in chosen], use_tqdm=False)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    return {
        i: [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.outputs]
        for i, output in zip(chosen, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def alone(tiny_path: Path) -> dict[int, Answer]:
    llm = LLM(str(tiny_path), enable_prefix_caching=False)
    return {i: answers(llm, [i])[i] for i in range(REQUESTS)}


def test_complete_answers_have_their_shape(alone: dict[int, Answer]) -> None:
    complete = 0
    for index, given in alone.items():
        shape = SHAPES[index % len(SHAPES)]
        for _, text, reason, _ in given:
            if shape is None or reason != "stop":
                continue
            complete += 1
            if shape.regex is not None:
                assert re.fullmatch(shape.regex, text)
            elif shape.choice is not None:
                assert text in shape.choice
            else:
                value = json.loads(text)
                if shape.json == PERSON:
                    assert set(value) == {"name", "kind", "sides"} and value["kind"] in ("circle", "square")
                elif shape.json == LIST:
                    assert 2 <= len(value) <= 5
                elif shape.json is not None:
                    assert value == shape.json["const"]
                else:
                    assert isinstance(value, dict)
    assert complete >= REQUESTS // 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 64},
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 64, "executor": "process"},
    ],
    ids=["crowd", "pieces", "preempted", "process"],
)
def test_alone_and_in_a_crowd(tiny_path: Path, alone: dict[int, Answer], settings: dict[str, Any]) -> None:
    llm = LLM(str(tiny_path), debug="executor" not in settings, **settings)
    assert answers(llm, list(range(REQUESTS))) == alone
    if "num_gpu_blocks_override" in settings:
        assert llm.llm_engine.scheduler.num_preemptions
    llm.llm_engine.close()
