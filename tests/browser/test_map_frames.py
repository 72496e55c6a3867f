"""The map of blocks shows in each frame what the numbers beside it say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.servers import engine_state
from tests.browser.tabs import OpenTab
from tests.server.api_server import ServerProcess

# The engine's events are those of the test, by window.tell(state).
OURS = """
    const real = window.fetch;
    window.fetch = (url, init) => {
        if (!String(url).includes("engine/events")) return real(url, init);
        const coder = new TextEncoder();
        const body = new ReadableStream({start: control => {
            window.tell = state => control.enqueue(coder.encode(`event: state\\ndata: ${JSON.stringify(state)}\\n\\n`));
        }});
        return Promise.resolve(new Response(body, {headers: {"Content-Type": "text/event-stream"}}));
    };
"""
# Tell a state; in the frame that shows its number: how many pixels of the map are coloured, as cells of an owner are.
COLOURED = """async ([state, owned]) => {
    const number = document.querySelector("[data-test=blocks-owned]");
    const told = number && new Promise(done => {
        const seen = new MutationObserver(() => number.textContent === owned && requestAnimationFrame(done));
        seen.observe(document.body, {subtree: true, childList: true, characterData: true});
    });
    window.tell(state);
    await told;
    const map = document.querySelector(".map canvas");
    if (!told || !map) return null;
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [map.width, map.height];
    const context = copy.getContext("2d", {willReadFrequently: true});
    context.drawImage(map, 0, 0);
    const pixels = context.getImageData(0, 0, copy.width, copy.height).data;
    let coloured = 0;
    for (let at = 0; at < pixels.length; at += 4) {
        const [red, green, blue] = pixels.subarray(at, at + 3);
        coloured += Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
    }
    return coloured;
}"""


def filled(state: dict[str, Any], owned: int) -> dict[str, Any]:
    """The engine's state with one request, which owns so many blocks of the first pool."""
    state = json.loads(json.dumps(state))
    pool = state["pools"][0]
    pool |= {"owned": owned, "cached": 0, "free": pool["total"] - owned}
    pool["map"] = [[owned, 2, 1], [pool["total"] - owned, 0, 0]]
    request = dict.fromkeys(("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "seconds"), 1)
    state["requests"] = [{"number": 2, "state": "running", "adapter": None, "sequences": 1, "blocks": owned, **request}]
    return state


@pytest.mark.parametrize("scale", [1, 2.625])
def test_a_phone_draws_every_block_that_it_counts(open_tab: OpenTab, endless: ServerProcess, scale: float) -> None:
    tab = open_tab("about:blank", viewport={"width": 360, "height": 740}, is_mobile=True, device_scale_factor=scale)
    tab.url = f"{endless.url}/"
    tab.page.add_init_script(OURS)
    tab.open("#engine")
    tab.page.wait_for_function("() => window.tell !== undefined")
    state = engine_state(endless)
    tab.page.evaluate("state => window.tell(state)", filled(state, 50))
    tab.expect("block-map").to_be_visible()
    tab.settle()
    cell = tab.page.evaluate(COLOURED, [filled(state, 51), "51"]) / 51
    assert cell > 1
    for owned in (99, 100, 101, 150, 200, 299, 300, 301, 500, 120):
        assert tab.page.evaluate(COLOURED, [filled(state, owned), str(owned)]) == owned * cell
