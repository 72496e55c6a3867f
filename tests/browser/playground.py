"""The playground as its user has it: options, columns, pictures, prompts, answers."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

from tests.browser.tabs import PATIENCE, Tab


class Playground:
    """What is done in a tab that shows #chat."""

    def __init__(self, tab: Tab, **options: object) -> None:
        """options: of the panel, by their names in the API."""
        self.tab = tab
        for name, value in options.items():
            self.option(name, value)

    def option(self, name: str, value: object) -> None:
        field = self.tab.find("system" if name == "system" else f"option-{name}")
        self.tab.find("toggle-options").wait_for()
        if not field.count():
            self.tab.find("toggle-options").click()
        if name in ("schema", "tools"):
            field.evaluate("field => { field.closest('details').open = true; }")
        field.fill(str(value))

    def columns(self, *models: str) -> None:
        """Columns for these, in this order."""
        self.tab.find("column").first.wait_for()
        for count in range(self.tab.find("column").count(), len(models)):
            self.tab.find("add-column").click()
            self.tab.expect("column").to_have_count(count + 1)
        for place, model in enumerate(models):
            self.tab.find("model-select").nth(place).select_option(model)

    def attach(self, *pictures: Path) -> None:
        self.tab.find("picture").set_input_files(pictures)

    def send(self, text: str) -> None:
        self.tab.find("prompt").fill(text)
        self.tab.find("send").click()

    def answers(self) -> list[str]:
        """All that stand on the page, once none is being given any more."""
        self.tab.expect("send").to_be_visible()
        return list(self.tab.find("answer-text").all_inner_texts())

    def reload(self) -> None:
        """Once the browser has kept the last answer: in the moments before, it promises nothing."""
        script = """() => new Promise((resolve, reject) => {
            const opened = indexedDB.open("quire");
            opened.onerror = () => reject(opened.error);
            opened.onsuccess = () => {
                const all = opened.result.transaction("conversations").objectStore("conversations").getAll();
                all.onsuccess = () => {
                    opened.result.close();
                    const last = all.result.map(one => one.turns.at(-1)?.answers ?? {});
                    resolve(last.flatMap(one => Object.values(one)).filter(one => one.finish !== null).length);
                };
            };
        })"""
        end = time.monotonic() + PATIENCE / 1000
        while not self.tab.page.evaluate(script):
            assert time.monotonic() < end, "the browser keeps no answer"
        self.tab.page.reload()

    def ask(self, text: str) -> str:
        """The last column's answer."""
        self.send(text)
        return self.answers()[-1]

    def hand_over(self, how: str, file: Path, kind: str) -> None:
        """Drop a file into the conversation ("drop"), or paste it into the prompt ("paste")."""
        script = """
            ([content, name, type, how]) => {
                const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0));
                const data = new DataTransfer();
                data.items.add(new File([bytes], name, {type}));
                const prompt = document.querySelector("[data-test=prompt]");
                const options = {bubbles: true, cancelable: true};
                prompt.dispatchEvent(how === "drop"
                    ? new DragEvent("drop", {dataTransfer: data, ...options})
                    : new ClipboardEvent("paste", {clipboardData: data, ...options}));
            }
        """
        self.tab.page.evaluate(script, [base64.b64encode(file.read_bytes()).decode(), file.name, kind, how])

    def take_in(self, *conversations: dict[str, Any]) -> None:
        """Import conversations; each needs `turns` at least."""
        export = {"format": "quire-conversations", "version": 1, "conversations": conversations}
        self.tab.find("toggle-conversations").wait_for()  # the page is there, with the list or without
        if not self.tab.find("import").count():
            self.tab.find("toggle-conversations").click()
        content = json.dumps(export).encode()
        self.tab.find("import").set_input_files(
            {"name": "export.json", "mimeType": "application/json", "buffer": content}
        )


def turn(text: str, answer: str, column: str = "c") -> dict[str, Any]:
    """One of an export: what was asked, and what a column answered."""
    return {"text": text, "answers": {column: {"model": "quire-demo", "text": answer, "finish": "stop"}}}
