"""What is asked of an answer besides its text: a JSON schema, and tools."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.playground import Playground
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sides": {"type": "integer", "minimum": 3, "maximum": 3}},
    "required": ["answer", "sides"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}}]


def body_of(tab: Tab, chat: Playground, text: str) -> dict[str, Any]:
    """Ask, wait for the answer, and see what was asked."""
    with tab.page.expect_request("**/v1/chat/completions") as request:
        chat.ask(text)
    found: dict[str, Any] = json.loads(request.value.post_data or "")
    return found


def test_an_answer_has_the_shape_of_a_schema(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0, schema=json.dumps(SCHEMA))
    body = body_of(tab, chat, "Has a triangle three sides?")
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    answer = json.loads(chat.answers()[-1])
    assert answer["answer"] in ("yes", "no") and answer["sides"] == 3
    tab.find("as-python").click()
    tab.expect("code-text").to_have_value(re.compile("response_format"))
    tab.page.keyboard.press("Escape")
    tab.expect("code-text").to_have_count(0)
    chat.option("schema", "")
    assert "response_format" not in body_of(tab, chat, "Who are you?")


@pytest.mark.parametrize("name", ["schema", "tools"])
def test_what_is_no_json_is_told_and_not_sent(open_tab: OpenTab, demo: ServerProcess, name: str) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0, **{name: '{"type": '})
    field = tab.find(f"option-{name}")
    tab.expect(field).to_have_attribute("aria-invalid", "true")
    tab.check_accessibility()
    sent: list[str] = []
    tab.page.on("request", lambda request: sent.append(request.url))
    chat.send("Who are you?")
    tab.expect("answer-error").to_contain_text("is no JSON")
    assert not [url for url in sent if "chat/completions" in url]
    chat.option(name, "")
    tab.expect(field).to_have_attribute("aria-invalid", "false")
    tab.find("retry").click()
    tab.expect("answer-text").to_contain_text("quire-demo")


@pytest.mark.parametrize("name", ["schema", "tools"])
def test_the_example_is_served(open_tab: OpenTab, demo: ServerProcess, name: str) -> None:
    """What the panel begins with on a click is a schema, or a list of tools, that the server takes."""
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0, max_tokens=40, **{name: ""})
    field = tab.find(f"option-{name}")
    tab.page.locator("details", has=field).get_by_role("button", name="Begin with an example").click()
    tab.expect(field).not_to_have_value("")
    asked = json.loads(field.input_value())
    body = body_of(tab, chat, "Who are you?")
    assert asked == (body["tools"] if name == "tools" else body["response_format"]["json_schema"]["schema"])
    tab.expect("answer-error").to_have_count(0)
    tab.expect("timings").to_contain_text("tokens")


def test_a_tool_is_called_and_given_its_result(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0, tools=json.dumps(TOOLS))
    choice = tab.page.get_by_label("Whether they are called")
    choice.select_option("always")
    body = body_of(tab, chat, "How is the weather?")
    assert (body["tools"], body["tool_choice"]) == (TOOLS, "required")
    tab.expect("call").to_contain_text('weather({"city": "Rome"})')
    tab.check_accessibility()
    choice.select_option("never")
    result = tab.page.get_by_label("What weather returns")
    result.fill("<b>sunny</b>")
    with tab.page.expect_request("**/v1/chat/completions") as request:
        result.press("Enter")
    tab.expect("answer").to_have_count(2)
    chat.answers()
    told = json.loads(request.value.post_data or "")["messages"]
    called, returned = told[-2]["tool_calls"][0], told[-1]
    assert json.loads(called["function"]["arguments"]) == {"city": "Rome"}
    assert returned == {"role": "tool", "tool_call_id": called["id"], "content": "<b>sunny</b>"}
    tab.expect(tab.find("asked").last).to_contain_text("Results of tools: <b>sunny</b>")
    tab.expect("answer-error").to_have_count(0)
    tab.check_accessibility()
    chat.reload()
    tab.expect("call").to_contain_text("weather")


def test_the_model_may_call_none(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0, tools=json.dumps(TOOLS))
    body = body_of(tab, chat, "Who are you?")
    assert (body["tools"], body["tool_choice"]) == (TOOLS, "auto")
    assert "quire-demo" in chat.answers()[-1]
    tab.expect("call").to_have_count(0)
