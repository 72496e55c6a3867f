"""instructor: its ways to objects need tools or structured output, but for one."""

from __future__ import annotations

import instructor
import openai
import pytest
from conftest import MODEL, QUESTION
from pydantic import BaseModel

ASKED = [{"role": "user", "content": QUESTION}]


class Color(BaseModel):
    """What is asked for."""

    color: str


def client(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


def test_text(url: str) -> None:
    made = client(url, instructor.Mode.MD_JSON)
    answer = made.chat.completions.create(model=MODEL, messages=ASKED, response_model=None, temperature=0)
    assert answer.choices[0].message.content == "Red."


def test_markdown_json_is_served(url: str) -> None:
    """It is asked for in the prompt alone. The bundled model cannot write JSON, and instructor says so."""
    with pytest.raises(Exception, match=r"(?i)validation|json") as caught:
        client(url, instructor.Mode.MD_JSON).create(
            model=MODEL, messages=ASKED, response_model=Color, max_retries=0, max_tokens=20
        )
    assert not isinstance(caught.value, openai.APIError) and "400" not in str(caught.value)


@pytest.mark.parametrize(("mode", "field"), [("TOOLS", "tool_choice"), ("JSON", "response_format")])
def test_refused_other_modes(url: str, mode: str, field: str) -> None:
    with pytest.raises(Exception, match=f"{field}: this version serves no"):
        client(url, instructor.Mode[mode]).create(model=MODEL, messages=ASKED, response_model=Color, max_retries=0)
