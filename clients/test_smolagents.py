"""smolagents' agents that call tools. Its own prompts are too long for the bundled model."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
from conftest import DRAW, LOOK, LOUD, MODEL, QUESTION, check_star
from PIL import Image
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


class Draw(Tool):
    """What DRAW asks for."""

    name = "draw"
    description = "Draw a shape."
    inputs: ClassVar = {
        "shape": {"type": "string", "description": "Which shape.", "enum": ["circle", "square", "triangle", "star"]},
        "color": {"type": "string", "description": "In which color."},
    }
    output_type = "string"

    def forward(self, shape: str, color: str) -> str:
        return "done"


@pytest.fixture
def model(url: str) -> OpenAIModel:
    return OpenAIModel(MODEL, api_base=url, api_key="none", temperature=0, max_tokens=60)


def agent(model: OpenAIModel, tools: list[Tool], **more) -> ToolCallingAgent:
    templates = copy.deepcopy(EMPTY_PROMPT_TEMPLATES)
    templates["system_prompt"] = "Be brief."
    templates["final_answer"] = {"pre_messages": "Answer.", "post_messages": "{{task}}"}
    return ToolCallingAgent(tools, model, prompt_templates=templates, verbosity_level=0, **more)


def test_text_and_images(model, url: str, picture) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert model.generate(asked).content == "Red."
    assert "".join(piece.content or "" for piece in model.generate_stream(asked)) == "Red."
    seen = [
        {"role": "user", "content": [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": LOOK}]}
    ]
    assert "RED CIRCLE" in OpenAIModel(LOUD, api_base=url, api_key="none").generate(seen).content


@pytest.mark.parametrize("streams", [False, True])
def test_tools(model, streams: bool) -> None:
    """A call is required of the model in every step; when its steps are used up, it is asked for an answer in words."""
    made = agent(model, [Draw()], max_steps=1, stream_outputs=streams)
    assert made.run(DRAW)
    (call,) = made.memory.steps[1].tool_calls
    assert call.name == "draw" and made.memory.steps[1].observations == "done"
    check_star(call.arguments)


@pytest.mark.parametrize("streams", [False, True])
def test_a_final_answer(model, streams: bool) -> None:
    """The tool that ends a run is the only one here."""
    result = agent(model, [], max_steps=1, stream_outputs=streams, return_full_result=True).run(QUESTION)
    assert result.state == "success" and isinstance(result.output, str)
