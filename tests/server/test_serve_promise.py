"""What comes over HTTP is what `LLM.generate` gives, token by token, in a crowd and while adapters come and go."""

from __future__ import annotations

import asyncio
import base64
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import ADAPTERS, adapter_path, picture_path
from tests.server.api_server import KEY, ServerProcess, adapters

pytestmark = pytest.mark.slow

CROWD = 64
CHANGE = 0.1  # seconds between two changes of adapters

PROMPTS = ("Once upon a time", "One day, a red circle", "There is a blue star", "A drum")
QUESTIONS = ("What do you see?", "What color is the star?", "How many shapes are there?")
STOPS = ([], ["the"], ["a ", "zz"])


@dataclass
class Asked:
    """One request, as both sides take it."""

    model: str
    prompt: str | None = None  # else a chat about the picture
    question: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def picture_url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(Path(picture_path()).read_bytes()).decode()

    @property
    def messages(self) -> list[dict[str, Any]]:
        picture = {"type": "image_url", "image_url": {"url": self.picture_url}}
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.question}]}]


def crowd(count: int, seed: int) -> list[Asked]:
    draw = random.Random(seed)
    asked = []
    for number in range(count):
        sampling: dict[str, Any] = {"max_tokens": draw.randint(4, 24), "temperature": 0.0}
        if number % 3 == 0:
            sampling |= {"temperature": 0.9, "seed": number, "n": draw.choice([1, 2, 3]), "top_p": 0.95}
        if number % 4 == 1:
            sampling["stop"] = draw.choice(STOPS)
        model = draw.choice(["quire-demo", *ADAPTERS])
        if draw.random() < 0.4:
            asked.append(Asked(model, question=draw.choice(QUESTIONS), sampling=sampling))
        else:
            asked.append(Asked(model, draw.choice(PROMPTS), sampling=sampling))
    return asked


Answer = list[tuple[str, list[int], str | None]]  # of each choice: text, tokens, why it ended


def expected(llm: LLM, one: Asked) -> Answer:
    params = SamplingParams(**one.sampling)
    adapter = None if one.model == "quire-demo" else LoRARequest(one.model, lora_path=str(adapter_path(one.model)))
    if one.prompt is not None:
        output = llm.generate(one.prompt, params, lora_request=adapter, use_tqdm=False)[0]
    else:
        output = llm.chat(one.messages, params, lora_request=adapter, use_tqdm=False)[0]
    return [(o.text, list(o.token_ids), o.finish_reason) for o in output.outputs]


async def whole(client: Any, one: Asked) -> Answer:
    extra = {"return_token_ids": True}
    if one.prompt is not None:
        done = await client.completions.create(model=one.model, prompt=one.prompt, **one.sampling, extra_body=extra)
        return [(c.text, c.token_ids, c.finish_reason) for c in done.choices]
    done = await client.chat.completions.create(
        model=one.model, messages=one.messages, **one.sampling, extra_body=extra
    )
    return [(c.message.content, c.token_ids, c.finish_reason) for c in done.choices]


async def streamed(client: Any, one: Asked) -> Answer:
    count = one.sampling.get("n", 1)
    texts, tokens, reasons = [""] * count, [list[int]() for _ in range(count)], [None] * count
    extra = {"return_token_ids": True}
    if one.prompt is not None:
        stream = await client.completions.create(
            model=one.model, prompt=one.prompt, stream=True, **one.sampling, extra_body=extra
        )
    else:
        stream = await client.chat.completions.create(
            model=one.model, messages=one.messages, stream=True, **one.sampling, extra_body=extra
        )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text if one.prompt is not None else choice.delta.content
            tokens[choice.index] += choice.token_ids
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return list(zip(texts, tokens, reasons, strict=True))


class Churn:
    """Loads, reloads and unloads adapters over HTTP, one change every CHANGE seconds."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.changes = 0
        self.failures: list[str] = []

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        steps = [
            ("load", {"lora_name": "extra", "lora_path": str(adapter_path("french"))}),
            ("load", {"lora_name": "french", "lora_path": str(adapter_path("french")), "load_inplace": True}),
            ("load", {"lora_name": "extra", "lora_path": str(adapter_path("shout")), "load_inplace": True}),
            ("load", {"lora_name": "shout", "lora_path": str(adapter_path("shout")), "load_inplace": True}),
            ("unload", {"lora_name": "extra"}),
        ]
        with self._server.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
            while not self._end.wait(CHANGE):
                kind, data = steps[self.changes % len(steps)]
                answer = http.post(f"/v1/{kind}_lora_adapter", json=data)
                if answer.status_code != 200:
                    self.failures.append(answer.text)
                self.changes += 1
            http.post("/v1/unload_lora_adapter", json={"lora_name": "extra"})


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*adapters(adapter_path("french").parent)) as running:
        yield running


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return crowd(CROWD, 5)


@pytest.fixture(scope="module")
def alone(asked: list[Asked]) -> list[Answer]:
    """Each request by itself, through `LLM`."""
    llm = LLM(enable_lora=True)
    return [expected(llm, one) for one in asked]


def test_the_crowd_is_mixed(asked, alone):
    assert {one.model for one in asked} == {"quire-demo", *ADAPTERS}
    assert any(one.prompt is None for one in asked) and any(one.sampling.get("n", 1) > 1 for one in asked)
    assert {reason for answer in alone for _, _, reason in answer} == {"stop", "length"}


@pytest.mark.parametrize("way", [whole, streamed], ids=["whole", "streamed"])
def test_answers_are_those_of_generate_while_adapters_come_and_go(server, asked, alone, way):
    async def all_at_once() -> list[Answer]:
        async with server.async_client() as client:
            return await asyncio.gather(*(way(client, one) for one in asked))

    with Churn(server) as churn:
        end = time.monotonic() + 4.0
        while time.monotonic() < end or churn.changes < 8:  # in crowds of all of them
            assert asyncio.run(all_at_once()) == alone
    assert churn.failures == [] and churn.changes >= 8


def test_a_name_that_changes_answers_with_one_version_or_none(server):
    """`extra` is french, then shout, then nobody, all the while: an answer is wholly one of theirs, or 404."""
    llm = LLM(enable_lora=True)
    ask = Asked("extra", question="What do you see?", sampling={"max_tokens": 30, "temperature": 0.0})
    versions = [expected(llm, Asked(name, question=ask.question, sampling=ask.sampling)) for name in ADAPTERS]
    seen: list[int] = []

    async def one(client: Any, way: Any) -> None:
        try:
            seen.append(versions.index(await way(client, ask)))  # a ValueError for an answer of neither
        except NotFoundError:
            seen.append(-1)

    async def many() -> None:
        async with server.async_client() as client:
            end = time.monotonic() + 300.0
            while set(seen) != {-1, 0, 1} or len(seen) < 100:
                assert time.monotonic() < end, f"of all answers none was of some kind: {set(seen)}"
                await asyncio.gather(*(one(client, way) for way in (whole, streamed) * 4))

    with Churn(server) as churn:
        asyncio.run(many())
    assert churn.failures == []


def test_both_ways_mixed(server, asked, alone):
    """Streams beside whole answers, in another order."""

    async def all_at_once() -> list[Answer]:
        async with server.async_client() as client:
            ways = [whole if number % 2 else streamed for number in range(len(asked))]
            order = random.Random(1).sample(range(len(asked)), len(asked))
            made = await asyncio.gather(*(ways[place](client, asked[place]) for place in order))
            return [answer for _, answer in sorted(zip(order, made, strict=True))]

    assert asyncio.run(all_at_once()) == alone
