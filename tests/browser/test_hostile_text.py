"""Texts that want to be more than text: in a prompt, in an answer, in a conversation of another's, in names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.playground import Playground, turn
from tests.browser.servers import until_idle
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import ServerProcess

TEXTS = {
    "script": "<script>window.taken = 1</script></textarea></div><script>document.title = 'taken'</script>",
    "image": '<img src=x onerror="window.taken = 1"><svg onload="window.taken = 1"><style>* { display: none }</style>',
    "links": "[here](javascript:window.taken=1) ![p](http://elsewhere.example/t.png) http://elsewhere.example/",
    "entities": "&lt;b&gt; &#60;script&#62; &nbsp;&copy; \\u003cscript\\u003e {{7*7}} ${7*7} </bdi></p>",
    "markdown": "# *" + "[" * 3000 + "]" * 3000 + "(" * 2000 + "> " * 1500 + "```" * 1000 + "**" * 1000 + "|-" * 1000,
    "table": "|a" * 800 + "\n" + "|-" * 800,
    "lists": "\n".join("  " * depth + "- x" for depth in range(300)),
    "right to left": "\u202egnp.elif\u202c שלום \u2067مرحبا\u2069 \u202b\u202b\u202b open for ever",
    "marks": "Z" + "\u0335\u0321\u0322\u0489" * 200 + " \u200b\u200d\ufeff\u2028\u2029 👩‍👩‍👧‍👦 \U000e0041 \ufffe",
    "one word": "w" * 20_000,
    "lines": "\n" * 2000 + "end",
}
NOTHING_TAKEN = """() => {
    const made = document.querySelectorAll("#app script, #app style, #app iframe, .turns a, .turns svg, .turns b");
    const sources = [...document.querySelectorAll("img")].map(one => one.src).filter(one => !one.startsWith("data:"));
    return [window.taken ?? null, document.title.includes("taken"), made.length, sources];
}"""


def check_untaken(tab: Tab) -> None:
    """No script ran, nothing was made of markup, and the page around is as it was."""
    assert tab.page.evaluate(NOTHING_TAKEN) == [None, False, 0, []]
    tab.check_width()
    tab.expect("prompt").to_be_in_viewport()
    tab.expect("view-engine").to_have_text("Engine")


def stream_of(text: str) -> str:
    """What the server answers, if its model writes this: some letters at a time."""
    parts = [text[at : at + 7] for at in range(0, len(text), 7)]
    chunks: list[dict[str, Any]] = [{"index": 0, "delta": {"content": part}, "finish_reason": None} for part in parts]
    chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    return "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def whole(tab: Tab, name: str) -> str:
    """The text of an element as it stands in the document. Long ones are in blocks, which end with their lines."""
    script = """one => [...one.querySelectorAll(".block")].map(block => block.textContent).join("\\n")"""
    return str(tab.find(name).last.evaluate(script))


@pytest.mark.parametrize("name", TEXTS)
def test_an_answer_is_text_whatever_it_says(open_tab: OpenTab, demo: ServerProcess, name: str) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab)
    text = TEXTS[name]
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=stream_of(text)),
    )
    chat.ask("Say something")
    assert whole(tab, "answer-text") == text
    check_untaken(tab)
    chat.reload()
    tab.expect("answer").to_have_count(1)
    assert whole(tab, "answer-text") == text
    check_untaken(tab)


@pytest.mark.parametrize("name", TEXTS)
def test_a_prompt_is_text_whatever_it_says(open_tab: OpenTab, endless: ServerProcess, name: str) -> None:
    """And the model gets it as it is: the server tells how many bytes it has, one token each."""
    tab = open_tab(endless.url)
    chat = Playground(tab, max_tokens=1)
    text = TEXTS[name][:12_000]
    with tab.page.expect_request("**/v1/chat/completions") as request:
        chat.ask(text)
    assert json.loads(request.value.post_data or "")["messages"][-1]["content"] == text
    assert whole(tab, "asked") == text
    check_untaken(tab)
    until_idle(endless)


def test_a_conversation_of_another_s_is_text(open_tab: OpenTab, demo: ServerProcess) -> None:
    """Titles, names of models and of columns, pictures that are none, tokens, errors."""
    tab = open_tab(demo.url)
    bad = TEXTS["image"]
    picture = {"name": bad, "url": "http://elsewhere.example/x.png"}
    answer = {"model": bad, "text": bad, "reasoning": bad, "error": bad, "calls": [{"name": bad, "arguments": bad}]}
    hostile = turn(bad, bad) | {"pictures": [picture, {"url": "javascript:window.taken=1"}], "answers": {"c": answer}}
    columns = [{"id": "c", "model": bad}, {"id": "__proto__", "model": "constructor"}]
    Playground(tab).take_in(
        {"id": bad, "title": bad, "turns": [hostile], "columns": columns, "options": {"system": bad}}
    )
    tab.expect(tab.find("answer").first).to_contain_text(bad)
    tab.expect(tab.find("conversation").filter(has_text=bad).first).to_be_visible()
    check_untaken(tab)


def test_text_from_right_to_left_stays_in_its_place(open_tab: OpenTab, demo: ServerProcess) -> None:
    """Its own direction, and none for what stands around it."""
    tab = open_tab(demo.url)
    Playground(tab).take_in(
        {"title": "\u202etxt", "turns": [turn("שלום, מה שלומך?", "\u202eevil")], "columns": [{"id": "c"}]}
    )
    tab.expect("answer-text").to_be_visible()
    looks = "one => [getComputedStyle(one).direction, getComputedStyle(one).unicodeBidi]"
    direction, isolated = tab.find("asked").locator(".block").evaluate(looks)
    assert direction == "rtl" and isolated in ("isolate", "plaintext", "isolate-override")
    for name in ("answer", "timings", "retry", "prompt"):
        assert tab.find(name).evaluate("one => getComputedStyle(one).direction") == "ltr"
