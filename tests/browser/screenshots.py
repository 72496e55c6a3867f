"""Draws the pictures of the page that README and docs show: `make screenshots`.

A server of the bundled model runs, and Chromium shows what its page does. Nothing is staged but the requests:
they are sent through the page, or by clients beside it, while the picture is taken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.demo import adapter_path, picture_path
from tests.browser.playground import Playground
from tests.browser.run import PACKAGES, ROOT, set_up
from tests.browser.tabs import PATIENCE, OpenTab, Tab, launch
from tests.server.api_server import ONE_THREAD, ServerProcess, adapters

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = ROOT / "docs" / "images"
WINDOW: Any = {"width": 1280, "height": 860}
STAR = "There is a red star and a blue circle. What color is the star?"
VOICES = ("quire-demo", "french", "shout")
HALF = re.compile(r"^[5-9]\d\d$|^1,")  # of the pool's blocks, about
FILES = ("adapter_config.json", "adapter_model.safetensors")


def playground(tab: Tab) -> None:
    """A picture and three voices, side by side."""
    chat = Playground(tab, temperature=0)
    chat.columns(*VOICES)
    chat.attach(Path(picture_path()))
    chat.ask("What do you see?")
    chat.ask("What color is the star?")
    tab.find("toggle-options").click()  # columns have its room


def tokens(tab: Tab) -> None:
    """What else might have stood in an answer."""
    chat = Playground(tab, temperature=1.5, seed=4)
    tab.find("shade").check()
    chat.ask(STAR)
    chat.ask("Tell me more about them.")
    tab.find("answer").last.get_by_test_id("token").first.hover()
    tab.expect("alternatives").to_be_visible()


def adapter_list(tab: Tab) -> None:
    """One that was uploaded, and what of it was bound."""
    tab.find("upload-files").set_input_files([Path(adapter_path("french")) / name for name in FILES])
    tab.find("upload-name").fill("my-french")
    tab.find("upload-send").click()
    tab.expect("adapter-row").to_have_count(3)
    tab.find("adapter-row").first.get_by_text("What was bound").click()


@contextmanager
def asking(server: ServerProcess) -> Iterator[None]:
    """Requests of all voices, with one beginning for each: twelve run, others wait."""
    prompt = STAR + " " + "Look again, and say it once more. " * 12
    with ExitStack() as held:
        for number in range(20):
            model = VOICES[number % len(VOICES)]
            body = {
                "model": model,
                "prompt": f"{prompt}{number}",
                "max_tokens": 1200,
                "stream": True,
                "ignore_eos": True,
            }
            client = held.enter_context(server.http())
            held.enter_context(client.stream("POST", "/v1/completions", json=body))
        yield


def engine(tab: Tab, server: ServerProcess) -> None:
    """Blocks that fill, of requests that run and some that wait."""
    with asking(server):
        tab.expect("running").to_have_text("12")
        tab.expect("waiting").not_to_have_text("0")
        tab.expect("blocks-owned").to_have_text(HALF)
        tab.find("hold").click()


def draw(browser: Browser, server: ServerProcess) -> None:
    def opened(view: str, **options: Any) -> Tab:
        context = browser.new_context(viewport=WINDOW, **options)
        context.set_default_timeout(PATIENCE)
        return Tab(context.new_page(), f"{server.url}/").open(f"#{view}")

    show: OpenTab = opened
    tab = show("chat")
    playground(tab)
    take(tab, "playground")
    tab = show("chat", color_scheme="dark")
    tokens(tab)
    take(tab, "tokens")
    tab = show("engine")
    tab.page.set_viewport_size({"width": 1280, "height": 1240})
    engine(tab, server)
    take(tab, "engine")
    tab = show("adapters")
    adapter_list(tab)
    take(tab, "adapters")


def take(tab: Tab, name: str) -> None:
    tab.check()
    tab.picture(FOLDER / f"page-{name}.png")


def main() -> None:
    if found := set_up():
        raise SystemExit("\n".join(["No pictures can be taken here. Missing:", *found]))
    sys.path.append(str(PACKAGES))
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    flags = [*adapters(adapter_path("french").parent), "--num-gpu-blocks-override", "1536", "--max-num-seqs", "12"]
    with ServerProcess(*flags, **ONE_THREAD) as server, sync_playwright() as driver:
        driver.selectors.set_test_id_attribute("data-test")
        draw(launch(driver), server)


if __name__ == "__main__":
    main()
