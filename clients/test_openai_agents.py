"""openai-agents, by chat completions and by responses."""

from __future__ import annotations

import asyncio

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from conftest import DRAW, MODEL, QUESTION, SCENE, Scene, check_scene, check_star, count, draw
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)  # it would call OpenAI
SETTINGS = {"temperature": 0}
LOOP = asyncio.new_event_loop()  # one for all: a client's connections belong to the loop that made them
TOOLS = [function_tool(each, strict_mode=strict) for each, strict in ((draw, True), (count, False))]


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, url: str):
    return request.param(MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))


def run(agent: Agent, asked, **more):
    return LOOP.run_until_complete(Runner.run(agent, asked, **more))


def streamed(agent: Agent, asked: str):
    async def ask():
        result = Runner.run_streamed(agent, asked)
        events = [event async for event in result.stream_events()]
        return result, events

    return LOOP.run_until_complete(ask())


def made(model, **more) -> Agent:
    settings = ModelSettings(**SETTINGS, **more.pop("settings", {}))
    return Agent(name="Quire", model=model, model_settings=settings, **more)


def test_text(model) -> None:
    assert run(made(model), QUESTION).final_output == "Red."
    assert run(made(model, instructions="Be brief."), QUESTION).final_output


def test_streams(model) -> None:
    result, events = streamed(made(model), QUESTION)
    deltas = [event.data for event in events if event.type == "raw_response_event"]
    assert "".join(one.delta for one in deltas if one.type == "response.output_text.delta") == "Red."
    assert result.final_output == "Red."


def test_conversations(model) -> None:
    first = run(made(model), QUESTION)
    assert run(made(model), [*first.to_input_list(), {"role": "user", "content": QUESTION}]).final_output


def calls(items) -> list:
    return [item.raw_item for item in items if item.type == "tool_call_item"]


@pytest.mark.parametrize("choice", [None, "required", "draw"])
def test_tools(model, choice: str | None) -> None:
    result = run(made(model, tools=TOOLS, settings={"tool_choice": choice}), DRAW)
    call = calls(result.new_items)[0]
    assert call.name == "draw" and result.final_output
    check_star(call.arguments)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs[0] == "done"


def test_streamed_tools(model) -> None:
    result, events = streamed(made(model, tools=TOOLS), DRAW)
    names = [event.name for event in events if event.type == "run_item_stream_event"]
    assert names == ["tool_called", "tool_output", "message_output_created"] and result.final_output
    check_star(calls(result.new_items)[0].arguments)


def test_a_tool_whose_answer_is_the_output(model) -> None:
    agent = made(model, tools=TOOLS, tool_use_behavior="stop_on_first_tool", settings={"tool_choice": "draw"})
    assert run(agent, DRAW).final_output == "done"


def test_output_types(model) -> None:
    agent = made(model, output_type=Scene)
    check_scene(run(agent, SCENE).final_output)
    check_scene(streamed(agent, SCENE)[0].final_output)


def test_handoffs(model) -> None:
    """The first agent has but one way to go on, and is made to take it."""
    painter = made(model)
    painter.name = "Painter"
    first = made(model, handoffs=[painter], settings={"tool_choice": "transfer_to_painter"})
    result = run(first, QUESTION)
    assert result.last_agent is painter and result.final_output
    result, events = streamed(first, QUESTION)
    assert result.last_agent is painter and any(getattr(event, "name", "") == "handoff_occured" for event in events)


def test_agents_as_tools(model) -> None:
    tool = made(model).as_tool("ask", "Ask what color it is.")
    result = run(made(model, tools=[tool], settings={"tool_choice": "ask"}), QUESTION)
    assert calls(result.new_items)[0].name == "ask" and result.final_output
