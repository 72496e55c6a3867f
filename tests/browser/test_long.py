"""Ten thousand tokens: in one answer, and in a conversation."""

from __future__ import annotations

import re

from tests.browser.playground import Playground, turn
from tests.browser.servers import until_idle
from tests.browser.tabs import OpenTab
from tests.server.api_server import ServerProcess

MANY = 10_000
# How often the answer's element changed, and how many frames the browser drew meanwhile.
WATCH = """() => {
    window.drawn = {frames: 0, changes: 0};
    const frame = () => { window.drawn.frames += 1; requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
    const changed = new MutationObserver(() => { window.drawn.changes += 1; });
    changed.observe(document.querySelector(".turns"), {subtree: true, childList: true, characterData: true});
}"""


def test_an_answer_of_ten_thousand_tokens(open_tab: OpenTab, endless: ServerProcess) -> None:
    """It is drawn once a frame at most, and a prompt can be written meanwhile."""
    tab = open_tab(endless.url)
    chat = Playground(tab, max_tokens=MANY)
    tab.page.evaluate(WATCH)
    chat.send("Write for long")
    tab.expect("answer-text").to_have_text(re.compile(r".{100}", re.S))
    tab.find("prompt").press_sequentially("written meanwhile")
    assert tab.find("prompt").input_value() == "written meanwhile"
    (text,) = chat.answers()
    assert len(text) == MANY
    tab.expect("timings").to_contain_text(f"→ {MANY} tokens")
    drawn = tab.page.evaluate("window.drawn")
    assert drawn["changes"] <= 2 * drawn["frames"] + 20, drawn
    tab.check_width()
    chat.reload()
    assert chat.answers() == [text]
    assert tab.find("prompt").input_value() == "written meanwhile"
    until_idle(endless)


def test_a_conversation_of_ten_thousand_tokens_goes_on(open_tab: OpenTab, endless: ServerProcess) -> None:
    """A hundred turns; the model reads a letter as a token, and gets them all."""
    tab = open_tab(endless.url)
    chat = Playground(tab)
    turns = [turn(f"{place:>50}", f"{place:50}") for place in range(100)]
    chat.take_in({"turns": turns, "columns": [{"id": "c", "model": "endless"}], "options": {"max_tokens": 3}})
    tab.expect("answer").to_have_count(100)
    chat.ask("and on")
    told = re.search(r"(\d+) (?:\(\d+ cached\) )?→ 3 tokens", tab.find("timings").last.inner_text())
    assert told and int(told[1]) > MANY
    tab.expect(tab.find("answer").last).to_be_in_viewport()
    tab.check_accessibility()
