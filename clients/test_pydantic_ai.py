"""pydantic-ai."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from anthropic import AsyncAnthropic
from conftest import DRAW, LOOK, LOUD, MODEL, QUESTION, SCENE, Scene, Shape, check_scene, check_star, count, draw
from pydantic_ai import Agent, BinaryContent, ModelRetry, NativeOutput, PromptedOutput, TextOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def agent(url: str, name: str = MODEL, **more) -> Agent:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(model, model_settings={"temperature": 0}, retries=0, **more)


def test_text_and_usage(url: str) -> None:
    result = agent(url).run_sync(QUESTION)
    assert result.output == "Red." and result.usage.output_tokens > 0


def test_instructions(url: str) -> None:
    assert agent(url, instructions="Be brief.").run_sync(QUESTION).output


def test_streams(url: str) -> None:
    async def ask() -> str:
        async with agent(url).run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(ask()) == "Red."


def test_images_and_an_adapter(url: str, picture: Path) -> None:
    asked = [BinaryContent(picture.read_bytes(), media_type="image/png"), LOOK]
    assert "red circle" in agent(url).run_sync(asked).output
    assert "RED CIRCLE" in agent(url, LOUD).run_sync(asked).output


def test_a_conversation(url: str) -> None:
    made = agent(url)
    first = made.run_sync(QUESTION)
    assert made.run_sync(QUESTION, message_history=first.all_messages()).output


API = ("chat", "responses", "anthropic")  # the three by which the package can call the server


@pytest.fixture(params=API)
def model(request: pytest.FixtureRequest, url: str, server: str):
    if request.param == "anthropic":
        # What it does not know by its name has no schemas, as far as the package knows.
        profile = ModelProfile(supports_json_schema_output=True)
        # Its own client would be made with httpx, and anthropic has come to httpx2.
        provider = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=server, api_key="none"))
        return AnthropicModel(MODEL, provider=provider, profile=profile)
    made = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return made(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))


# Anthropic's later packages have no argument for a temperature.
SETTINGS = {"max_tokens": 300, "extra_body": {"temperature": 0}}


def test_text_by_each_api(model) -> None:
    assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output == "Red."


@pytest.mark.parametrize("output", [ToolOutput(Scene), NativeOutput(Scene), Scene])
def test_output_types(model, output) -> None:
    check_scene(Agent(model, output_type=output, model_settings=SETTINGS).run_sync(SCENE).output)


@pytest.mark.parametrize("output", [ToolOutput(Scene), NativeOutput(Scene)])
def test_streamed_output_types(model, output) -> None:
    async def ask() -> Scene:
        async with Agent(model, output_type=output, model_settings=SETTINGS).run_stream(SCENE) as result:
            return [piece async for piece in result.stream_output()][-1]

    check_scene(asyncio.run(ask()))


def test_prompted_output(url: str) -> None:
    """The schema stands in the prompt, and response_format asks for any JSON; the model keeps to it by itself, or by
    what the server takes besides."""
    shaped = OpenAIModelProfile(supports_json_object_output=False)
    provider = OpenAIProvider(base_url=url, api_key="none")
    body = {**SETTINGS["extra_body"], "structured_outputs": {"json": Scene.model_json_schema()}}
    made = Agent(
        OpenAIChatModel(MODEL, provider=provider, profile=shaped),
        output_type=PromptedOutput(Scene), model_settings={**SETTINGS, "extra_body": body},
    )  # fmt: skip
    check_scene(made.run_sync(SCENE).output)


def test_output_functions(model) -> None:
    """A function whose arguments are the output, and one that takes the text."""

    def painted(color: str, shape: str) -> str:
        """Paint a shape."""
        return f"painted a {color} {shape}"

    assert Agent(model, output_type=painted, model_settings=SETTINGS).run_sync(DRAW).output == "painted a red star"

    def words(text: str) -> list[str]:
        return text.split()

    assert Agent(model, output_type=TextOutput(words), model_settings=SETTINGS).run_sync(QUESTION).output == ["Red."]


def test_several_output_types(model) -> None:
    made = Agent(model, output_type=[Scene, Shape], model_settings=SETTINGS)
    assert isinstance(made.run_sync(SCENE).output, Scene | Shape)


def test_tools(model) -> None:
    result = Agent(model, tools=[draw, count], model_settings=SETTINGS).run_sync(DRAW)
    (call,) = [part for message in result.all_messages() for part in message.parts if part.part_kind == "tool-call"]
    (back,) = [part for message in result.all_messages() for part in message.parts if part.part_kind == "tool-return"]
    assert call.tool_name == "draw" and back.content == "done" and result.output
    check_star(call.args_as_dict())


def test_streamed_tools(model) -> None:
    async def ask() -> list:
        made = Agent(model, tools=[draw, count], model_settings=SETTINGS)
        async with made.run_stream_events(DRAW) as stream:
            return [event async for event in stream]

    events = asyncio.run(ask())
    (call,) = [event for event in events if event.event_kind == "function_tool_call"]
    check_star(call.part.args_as_dict())
    assert any(event.event_kind == "part_delta" for event in events) and events[-1].result.output


def test_a_tool_that_asks_again(model) -> None:
    """ModelRetry: the reason goes back as the tool's answer."""
    made = Agent(model, model_settings=SETTINGS, retries=2)
    calls = []

    @made.tool_plain
    def draw(shape: str, color: str) -> str:
        """Draw a shape."""
        calls.append((shape, color))
        if len(calls) == 1:
            raise ModelRetry("The pencil broke: try again.")
        return "Done."

    # What is said in the end is the model's; the reason must reach it, and its answer must be read.
    assert made.run_sync(DRAW).output and calls
