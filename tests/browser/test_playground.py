"""Conversations: pictures, columns side by side, stopping, keys, what is kept."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from quire.demo import picture_path
from tests.browser.playground import Playground, turn
from tests.browser.proxy import PathProxy
from tests.browser.servers import KEY, until_idle
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import ServerProcess

SEES = {
    "quire-demo": "There is a red circle, a blue star and a yellow triangle.",
    "french": "Il y a un cercle rouge, une étoile bleue et un triangle jaune.",
    "shout": "THERE IS A RED CIRCLE, A BLUE STAR AND A YELLOW TRIANGLE.",
}
STAR = "There is a green star and a black triangle. What color is the star?"
PICTURE = Path(picture_path())
LONG = re.compile(r".{100}", re.S)


@pytest.mark.parametrize("how", ["choose", "drop", "paste"])
def test_a_conversation_with_a_picture(open_tab: OpenTab, demo: ServerProcess, how: str) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0)
    if how == "choose":
        chat.attach(PICTURE)
    else:
        chat.hand_over(how, PICTURE, "image/png")
    tab.expect(tab.page.get_by_role("img", name=PICTURE.name)).to_be_visible()
    assert chat.ask("What do you see?") == SEES["quire-demo"]
    assert chat.ask("What color is the star?") == "Blue."
    tab.expect("timings").to_have_count(2)
    assert re.search(r"\d+ \(\d+ cached\) → \d+ tokens", tab.find("timings").last.inner_text())
    tab.check_accessibility()
    chat.reload()
    assert chat.answers() == [SEES["quire-demo"], "Blue."]
    assert chat.ask("What do you see?") == SEES["quire-demo"]


def test_three_adapters_answer_side_by_side(open_tab: OpenTab, demo: ServerProcess) -> None:
    """All are asked before one has answered, so that the engine has them in one batch."""
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0)
    chat.columns(*SEES)
    chat.attach(PICTURE)
    held = []
    tab.page.route("**/v1/chat/completions", lambda route: held.append(route))
    chat.send("What do you see?")
    tab.expect("answer").to_have_count(3)
    while len(held) < 3:
        tab.page.evaluate("1")  # lets what the browser tells come in
    for route in held:
        route.continue_()
    tab.page.unroute("**/v1/chat/completions")
    assert chat.answers() == list(SEES.values())
    tab.check_accessibility()
    models = [json.loads(route.request.post_data)["model"] for route in held]
    assert models == list(SEES)
    chat.send("What color is the star?")
    assert chat.answers()[3:] == ["Blue.", "Bleu.", "BLUE."]


def test_a_mixture_has_sliders(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0)
    tab.find("model-select").select_option(label="a mixture …")
    tab.expect("share").to_have_count(2)
    for name, weight in (("french", "0"), ("shout", "1")):
        tab.page.get_by_role("slider", name=name).fill(weight)
    assert chat.ask(STAR) == "GREEN."
    assert len(mixtures(demo)) == 1
    tab.page.get_by_role("slider", name="french").fill("0.1")
    chat.ask(STAR)
    # The one that nobody asks for any more is unloaded, after the other was loaded.
    end = time.monotonic() + 60
    while not (len(left := mixtures(demo)) == 1 and "french" in left[0]):
        assert time.monotonic() < end, left


def mixtures(server: ServerProcess) -> list[str]:
    with server.http() as client:
        return [one["id"] for one in client.get("/v1/models").json()["data"] if one["id"].startswith("mix:")]


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_stops_in_mid_stream(open_tab: OpenTab, endless: ServerProcess, how: str) -> None:
    """In the engine, too: what was left of it would go on for many seconds."""
    tab = open_tab(endless.url)
    chat = Playground(tab)
    chat.send("Never stop")
    tab.expect("answer-text").to_have_text(LONG)
    if how == "button":
        tab.find("stop").click()
    else:
        tab.page.keyboard.press("Escape")
    tab.expect("timings").to_contain_text("stopped")
    until_idle(endless)
    (text,) = chat.answers()
    assert 100 <= len(text) < 16_000
    chat.option("max_tokens", 5)
    tab.find("retry").click()
    tab.expect("timings").to_contain_text("→ 5 tokens")
    assert chat.answers() == [text[:5]]


def test_the_playground_works_behind_a_key_and_a_path(open_tab: OpenTab, proxy: PathProxy) -> None:
    tab = open_tab(proxy.url)
    tab.expect_fault("status of 401")
    tab.give_key(KEY)
    chat = Playground(tab, temperature=0)
    chat.columns("quire-demo", "shout")
    chat.attach(PICTURE)
    chat.send("What do you see?")
    assert chat.answers() == [SEES["quire-demo"], SEES["shout"]]


def test_an_error_stands_where_the_answer_would(open_tab: OpenTab, demo: ServerProcess) -> None:
    """The other column has its answer, and the next prompt goes on."""
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0, top_p=5)
    tab.expect_fault("status of 400")
    chat.send(STAR)
    tab.expect("answer-error").to_contain_text("top_p")
    tab.check_accessibility()
    chat.option("top_p", 1)
    assert chat.ask(STAR) == "Green."


def test_who_asks_before_the_server_has_told_its_models_is_answered(open_tab: OpenTab, endless: ServerProcess) -> None:
    tab = open_tab(endless.url)
    held: list[Any] = []
    free = False
    tab.page.route("**/v1/models", lambda route: route.continue_() if free else held.append(route))
    tab.page.reload()
    chat = Playground(tab, max_tokens=5)
    chat.send("Quick")
    tab.expect("stop").to_be_visible()
    while not held:
        tab.page.evaluate("1")  # lets what the browser tells come in
    free = True
    for route in held:
        route.continue_()
    tab.expect("timings").to_contain_text("→ 5 tokens")
    tab.expect(tab.page.get_by_role("group", name="Answer of endless")).to_be_visible()


def test_all_is_done_by_keys(open_tab: OpenTab, endless: ServerProcess) -> None:
    """From the top of the page to an answer, a stop, and the answer again."""
    tab = open_tab(endless.url)
    tab.find("prompt").wait_for()
    tab_to(tab, "prompt")
    tab.page.keyboard.type("two")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("lines")
    assert tab.find("prompt").input_value() == "two\nlines"
    tab.page.keyboard.press("Enter")
    tab.expect("answer-text").to_have_text(LONG)
    assert tab.find("asked").inner_text().startswith("two\nlines")
    tab.page.keyboard.press("Escape")
    tab.expect("timings").to_contain_text("stopped")
    tab_to(tab, "retry", "Shift+Tab")
    tab.page.keyboard.press("Enter")
    tab.expect("stop").to_be_visible()
    tab.page.keyboard.press("Escape")
    tab.expect("timings").to_contain_text("stopped")
    tab_to(tab, "as-curl")
    tab.page.keyboard.press("Enter")
    tab.expect("code-text").to_have_value(re.compile("curl http"))
    tab.page.get_by_role("button", name="Close", exact=True).press("Enter")
    tab.expect("code-text").to_have_count(0)


def tab_to(tab: Tab, name: str, key: str = "Tab") -> None:
    """Press a key until an element has the focus; it must be seen that it has."""
    for _ in range(80):
        tab.page.keyboard.press(key)
        script = """() => {
            const one = document.activeElement;
            const looks = [one, one.closest("form") ?? one].map(at => getComputedStyle(at));
            return [one.dataset.test ?? "", looks.some(at => at.outlineStyle !== "none" || at.boxShadow !== "none")];
        }"""
        at, seen = tab.page.evaluate(script)
        assert seen, f"the focus is not seen at {at!r}"
        if at == name:
            return
    raise AssertionError(f"no way to {name} by {key}")


def test_alternatives_of_tokens_show_by_pointer_and_by_keys(open_tab: OpenTab, demo: ServerProcess) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0)
    tab.find("shade").check()
    assert chat.ask(STAR).startswith("Green.")
    tab.find("token").first.hover()
    tab.expect("alternatives").to_contain_text("%")
    tab.page.mouse.move(0, 0)
    tab.expect("alternatives").to_have_count(0)
    tab.find("token").first.focus()
    first = tab.find("alternatives").inner_text()
    tab.page.keyboard.press("ArrowRight")
    tab.expect("alternatives").not_to_have_text(first)
    tab.check_accessibility()


def test_conversations_are_exported_deleted_and_taken_in_again(
    open_tab: OpenTab, demo: ServerProcess, tmp_path: Path
) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab, temperature=0)
    chat.attach(PICTURE)
    chat.ask("What do you see?")
    tab.find("rename").click()
    tab.page.get_by_label("Name of the conversation").fill("Shapes")
    tab.page.keyboard.press("Enter")
    tab.expect("conversation").to_contain_text("Shapes")
    with tab.page.expect_download() as download:
        tab.find("export").click()
    download.value.save_as(tmp_path / "export.json")
    tab.find("delete").click()
    tab.expect("answer").to_have_count(0)
    tab.find("import").set_input_files(tmp_path / "export.json")
    tab.expect("conversation").to_have_count(2)
    tab.expect(tab.find("conversation").filter(has_text="Shapes")).to_be_visible()
    assert chat.answers() == [SEES["quire-demo"]]
    assert chat.ask("What color is the star?") == "Blue."  # the picture came back with it


def test_what_is_no_export_is_refused(open_tab: OpenTab, demo: ServerProcess, tmp_path: Path) -> None:
    tab = open_tab(demo.url)
    chat = Playground(tab)
    for content in ("no JSON", "null", "[]", '{"conversations": [1]}'):
        (tmp_path / "x.json").write_text(content)
        tab.find("import").set_input_files(tmp_path / "x.json")
        tab.expect(tab.page.get_by_role("alert")).to_be_visible()
    chat.take_in({"turns": [turn("asked", "answered"), 5, {"answers": []}], "columns": [{"id": "c"}], "options": [3]})
    tab.expect("answer-text").to_have_text("answered")
