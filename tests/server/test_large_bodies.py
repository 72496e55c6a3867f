"""Large bodies are read by a worker and counted before they are built: nobody else waits for them."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.demo import adapter_path
from quire.server.schemas import body as bodies
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT, LOAD = "/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"
LARGEST, SIZE = 31 << 20, 16 << 20  # bytes
WAIT = 1.0  # seconds for /health; unbounded, the bodies below hold the event loop for 5
GROWTH = 400 << 20  # bytes; unbounded, such a body takes 870 MiB


@pytest.fixture(scope="module")
def server(plain_model: Path) -> Iterator[LocalServer]:
    engine = {"model": str(plain_model), "enable_lora": True}
    root = (str(adapter_path("french").parent),)
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=root) as server:
        yield server


def filled(before: bytes, part: bytes, after: bytes, size: int = SIZE) -> bytes:
    return before + part * ((size - len(before) - len(after)) // len(part)) + after


def post(server: LocalServer, path: str, content: bytes) -> tuple[int, Any]:
    with server.http() as client:
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    return answer.status_code, answer.json()


def longest_wait(server: LocalServer, work: Callable[[], Any]) -> float:
    """How long /health takes at most while some work is done in another thread, in seconds of this process's CPU time:
    who waits while the event loop is held waits so long at least, and a machine that has other work adds nothing.
    """
    thread = threading.Thread(target=work)
    thread.start()
    longest, asked = 0.0, 0
    with server.http() as client:
        while thread.is_alive() or not asked:
            begun = time.process_time()
            assert client.get("/health").status_code == 200
            longest, asked = max(longest, time.process_time() - begun), asked + 1
            time.sleep(0.01)
    thread.join()
    return longest


def peak(reset: bool = False) -> int:
    """Bytes of memory that this process has had at most."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


ATTACKS = {
    "lists": (COMPLETIONS, filled(b'{"prompt":[', b"[],", b"[]]}", LARGEST)),
    "lists in lists": (COMPLETIONS, filled(b'{"prompt":[', b"[[]],", b"[]]}")),
    "a field that is none": (COMPLETIONS, filled(b'{"prompt":"a","x":[', b"{},", b"{}]}")),
    "numbers": (COMPLETIONS, filled(b'{"prompt":[', b"1,", b"1]}")),
    "texts": (COMPLETIONS, filled(b'{"prompt":[', b'"",', b'""]}')),
    "names": (COMPLETIONS, filled(b'{"prompt":"a","logit_bias":{', b'"1":1,', b'"2":1}}')),
    "messages": (CHAT, filled(b'{"messages":[', b'{"role":"user","content":"a"},', b"{}]}")),
    "parts": (CHAT, filled(b'{"messages":[{"role":"user","content":[', b"{},", b"{}]}]}")),
    "a text to be tokens": ("/tokenize", filled(b'{"messages":[', b"{},", b"{}]}")),
    "tokens to be text": ("/detokenize", filled(b'{"tokens":[', b"[],", b"1]}")),
    "adapters": (LOAD, filled(b'{"lora_name":"x","adapters":[', b'{"name":"x"},', b"{}]}")),
    "open lists": (COMPLETIONS, filled(b'{"prompt":', b"[", b"")),
    "no end of a text": (COMPLETIONS, filled(b'{"prompt":"', b"a,[{", b"")),
    "backslashes": (COMPLETIONS, filled(b'{"prompt":"', b"\\", b"")),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_nobody_waits_for_a_body_that_holds_too_much(server: LocalServer, case: str) -> None:
    path, content = ATTACKS[case]
    answers: list[tuple[int, Any]] = []
    before = peak(reset=True)
    assert longest_wait(server, lambda: answers.append(post(server, path, content))) < WAIT
    assert peak() - before < GROWTH
    status, told = answers[0]
    assert status == 400 and len(json.dumps(told)) < 3000


def test_nor_for_four_of_them_at_once(server: LocalServer) -> None:
    path, content = ATTACKS["lists"]

    def four() -> None:
        threads = [threading.Thread(target=post, args=(server, path, content)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert longest_wait(server, four) < WAIT


# Within the limits of quire's own, and of a count that is wrong about texts.
GOOD: dict[str, tuple[str, Any, int]] = {
    "ids": (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [5, 6, 7] * 33_000}, 200),
    "many prompts": (COMPLETIONS, {"prompt": [[7] * 400] * 250, "max_tokens": 1}, 200),
    "an image": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:," + "A" * SIZE}}]}
            ]
        },
        400,  # there is no chat template
    ),
    "a text full of signs": ("/tokenize", {"prompt": ',[{:"\\' * 300_000}, 400),  # it is longer than the context
    "tokens": ("/detokenize", {"tokens": [7] * 4096}, 200),
    "300,000 ids": (COMPLETIONS, {"prompt": list(range(300_000))}, 400),  # so is this
}


@pytest.mark.parametrize("case", GOOD)
def test_what_is_large_and_right_is_read(server: LocalServer, case: str) -> None:
    path, given, expected = GOOD[case]
    status, told = post(server, path, json.dumps(given).encode().ljust(bodies.SMALL + 1))
    assert status == expected, told
    assert "holds too much" not in json.dumps(told)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": "a", "temperature": "hot"}, "temperature"), ({"prompt": "a", "nobody": 1}, "nobody"),
        ({}, "prompt"),
        ({"prompt": ["a", 1, [2]]}, "prompt"), ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        ([], None), ("a", None), ({"prompt": "a", "best_of": "x", "n": "y"}, None),
    ],
)  # fmt: skip
def test_a_fault_is_told_as_it_is_of_a_small_body(server: LocalServer, given: Any, param: str | None) -> None:
    text = json.dumps(given).encode()
    small, large = post(server, COMPLETIONS, text), post(server, COMPLETIONS, text.ljust(bodies.SMALL + 1))
    assert small == large and small[0] == 400
    assert param is None or small[1]["error"]["param"] == param
    broken = post(server, COMPLETIONS, text + b"}"), post(server, COMPLETIONS, text + b"}".rjust(bodies.SMALL))
    assert broken[0][0] == broken[1][0] == 400 and "no JSON object" in broken[1][1]["error"]["message"]


def test_what_is_counted_is_what_a_reader_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    signs = ["a,b", '{"', "\\", '\\"', "[", "é,\\", "", "\\\\", '":{']

    def some(depth: int) -> Any:
        kind = draw.random()
        if depth > 4 or kind < 0.3:
            return draw.choice([1, 2.5, None, True, *signs])
        if kind < 0.6:
            return [some(depth + 1) for _ in range(draw.randrange(5))]
        return {f"{draw.choice(signs)}{n}": some(depth + 1) for n in range(draw.randrange(5))}

    def made(value: Any) -> list[int]:
        """Commas, lists and objects, texts."""
        if isinstance(value, str):
            return [0, 0, 1]
        if not isinstance(value, (list, dict)):
            return [0, 0, 0]
        inner = [made(one) for one in (value.values() if isinstance(value, dict) else value)]
        names = len(value) if isinstance(value, dict) else 0
        own = [max(0, len(value) - 1), 1, names]
        return [sum(column) for column in zip(own, *inner, strict=True)]

    for _ in range(300):
        value = some(0)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        monkeypatch.setattr(bodies, "_PIECE", draw.choice([1, 2, 3, 7, 64, 1 << 20]))
        found, most = bodies.count(text), bodies.count_at_most(text)
        assert [found.values, found.containers, found.quotes / 2] == made(value), text
        assert most.values >= found.values and most.containers >= found.containers and most.quotes >= found.quotes
