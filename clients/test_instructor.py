"""instructor: all modes that it has for such a server, and for Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import anthropic
import instructor
import openai
import pytest
from conftest import DRAW, MODEL, QUESTION, SCENE, Scene, Shape, check_scene
from pydantic import BaseModel, ConfigDict, field_validator

ASKED = [{"role": "user", "content": QUESTION}]
MODES = (
    "TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "JSON_O1", "RESPONSES_TOOLS",
    "RESPONSES_TOOLS_WITH_INBUILT_TOOLS",
)  # fmt: skip
SCHEMA = {"structured_outputs": {"json": Scene.model_json_schema()}}


def client(url: str, mode: str) -> instructor.Instructor:
    return instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )


def settings(content: str = SCENE) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_retries": 0, "temperature": 0}


class Draw(BaseModel):
    """Draw a shape."""

    shape: str
    color: str


class Count(BaseModel):
    """Count the shapes of a kind."""

    kind: str


def test_text(url: str) -> None:
    made = client(url, "MD_JSON")
    answer = made.chat.completions.create(model=MODEL, messages=ASKED, response_model=None, temperature=0)
    assert answer.choices[0].message.content == "Red."


@pytest.mark.parametrize("mode", MODES)
def test_modes(url: str, mode: str) -> None:
    check_scene(client(url, mode).create(**settings(), response_model=Scene))


@pytest.mark.parametrize("mode", MODES)
def test_partial_objects(url: str, mode: str) -> None:
    *before, last = client(url, mode).create_partial(**settings(), response_model=Scene)
    check_scene(last.model_dump())
    sizes = [len(each.shapes or ()) for each in before]
    assert before and sizes == sorted(sizes)


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


def test_modes_that_put_the_schema_into_the_prompt(url: str) -> None:
    """JSON asks for any JSON besides; what MD_JSON asks for in words only, the server can be told by its own field.
    Such prompts are far from what the bundled model knows: what is in its answers is not looked at."""
    for made, more, wanted in (
        (client(url, "JSON"), {}, Anything),
        (client(url, "MD_JSON"), {"extra_body": SCHEMA}, Scene),
    ):
        assert isinstance(made.create(**settings(), **more, response_model=wanted), wanted)
        assert list(made.create_partial(**settings(), **more, response_model=wanted))


def test_iterables(url: str) -> None:
    """In the modes that say that there must be a list: where it may be left out, the model may leave it out."""
    for mode in ("RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"):
        found = list(client(url, mode).create_iterable(**settings(), response_model=Shape))
        check_scene({"shapes": [each.model_dump() for each in found]})
    body = {"structured_outputs": {"json": {**Scene.model_json_schema(), "additionalProperties": False}}}
    found = list(client(url, "MD_JSON").create_iterable(**settings(), extra_body=body, response_model=Shape))
    assert found and all(isinstance(each, Shape) for each in found)


def test_parallel_tools(url: str) -> None:
    found = list(client(url, "PARALLEL_TOOLS").create(**settings(DRAW), response_model=Iterable[Draw | Count]))
    assert found and all(isinstance(each, Draw | Count) for each in found)  # which one it is, is the small model's


def test_raw_answers_and_async(url: str) -> None:
    found, raw = client(url, "TOOLS").create_with_completion(**settings(), response_model=Scene)
    check_scene(found)
    assert raw.choices[0].message.tool_calls[0].function.name == "Scene" and raw.usage.completion_tokens

    async def ask() -> Scene:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as served:
            return await instructor.from_openai(served).create(**settings(), response_model=Scene)

    check_scene(asyncio.run(ask()))


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_asking_again(url: str, mode: str) -> None:
    """What a validator refuses goes back into the history, with the reason: a tool's message, or the user's."""
    refused = []

    class Picky(Scene):
        @field_validator("shapes")
        @classmethod
        def at_the_second_time(cls, value):
            if not refused:
                refused.append(value)
                raise ValueError("not yet")
            return value

    found = client(url, mode).create(**{**settings(), "max_retries": 2}, response_model=Picky)
    assert refused and isinstance(found, Picky)


@pytest.mark.parametrize(("mode", "model"), [("TOOLS", Scene), ("PARALLEL_TOOLS", Iterable[Draw | Count])])
def test_anthropics_api(server: str, mode: str, model) -> None:
    """In its other modes the schema is in the prompt alone."""
    served = anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)
    made = instructor.from_anthropic(served, mode=instructor.Mode[mode])
    asked = dict(model=MODEL, max_tokens=300, max_retries=0, extra_body={"temperature": 0}, response_model=model)
    if mode == "TOOLS":
        check_scene(made.create(**asked, messages=[{"role": "user", "content": SCENE}]))
        return
    found = list(made.create(**asked, messages=[{"role": "user", "content": DRAW}]))
    assert found and all(isinstance(each, Draw | Count) for each in found)
