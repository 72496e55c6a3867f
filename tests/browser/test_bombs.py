"""Answers that cost a browser much: long lines, deep nesting, letters of both directions, letters in several tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.playground import Playground
from tests.browser.tabs import OpenTab
from tests.browser.test_hostile_text import check_untaken, stream_of, whole
from tests.server.api_server import ServerProcess

LONGEST = 4000  # characters that the browser lays out as one, and anew for each change in them
BOMBS = {
    "stars": "*" * 50_000,
    "brackets": "[" * 20_000 + "]" * 20_000,
    "ticks": "`" * 50_000,
    "one line": "w" * 100_000,
    "words": "word " * 10_000,
    "both directions": "\u05e9a " * 12_000,
    "brackets of both": "(" * 15_000 + "\u05e9" + ")" * 15_000,
    "letters of two units": "\U0001f600" * 20_000,
}
LAID_OUT = """answer => {
    const walker = document.createTreeWalker(answer, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        const box = walker.currentNode.parentElement.closest(".part, .last-part, .block");
        found.push([box.textContent.length, getComputedStyle(box).display, box.className]);
    }
    return found;
}"""


def answering(tab: Any, body: str) -> None:
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


@pytest.mark.parametrize("name", BOMBS)
def test_no_line_is_laid_out_as_one(open_tab: OpenTab, demo: ServerProcess, name: str) -> None:
    """And it is one for who copies it."""
    tab = open_tab(demo.url)
    chat = Playground(tab)
    text = BOMBS[name]
    answering(tab, stream_of(text))
    assert chat.ask("Say something").rstrip() == text.rstrip()
    assert whole(tab, "answer-text") == text
    parts = tab.find("answer-text").evaluate(LAID_OUT)
    assert all(length <= LONGEST for length, _, _ in parts)
    assert [display for _, display, kind in parts if kind == "part"] == ["inline-block"] * (len(parts) - 1)
    check_untaken(tab)


def tokens(pieces: list[bytes]) -> str:
    """A stream whose tokens have these bytes, each beside one that is another part of a letter."""

    def told(piece: bytes) -> dict[str, Any]:
        return {"token": piece.decode(errors="replace"), "logprob": -1, "bytes": list(piece)}

    chunks: list[dict[str, Any]] = []
    for at in range(0, len(pieces), 50):
        some = pieces[at : at + 50]
        content = [told(piece) | {"top_logprobs": [told(piece), told(b"\xf0")]} for piece in some]
        delta = {"content": b"".join(some).decode(errors="replace")}
        chunks.append({"index": 0, "delta": delta, "finish_reason": None, "logprobs": {"content": content}})
    chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    return "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_letters_of_several_tokens_are_shown_as_letters(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab)
    tab.find("shade").check()
    answering(tab, tokens([b"a", b"\xd7", b"\xa9", b" ", b"\xe6\xb0", b"\xb4", b"\xef"]))
    chat.ask("Say something")
    assert tab.find("token").all_text_contents() == ["a", "", "\u05e9", " ", "", "\u6c34", "\ufffd"]
    tab.find("token").nth(2).hover()
    tab.expect(tab.find("alternatives").locator("code")).to_have_text(["<a9>", "<f0>"])
    tab.expect(tab.find("alternatives").locator(".taken")).to_have_count(1)


def test_shaded_tokens_are_laid_out_in_parts(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab)
    tab.find("shade").check()
    letters = [b"w"] * 5000
    answering(tab, tokens(letters))
    assert chat.ask("Say something") == "w" * 5000
    parts = tab.find("answer-text").locator(".part, .last-part")
    assert all(len(one) <= LONGEST for one in parts.all_text_contents())
    assert parts.count() == 5
    tab.find("token").nth(999).press("ArrowRight")
    tab.expect(tab.find("token").nth(1000)).to_be_focused()
    check_untaken(tab)
