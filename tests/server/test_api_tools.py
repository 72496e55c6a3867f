"""Routes that tools ask for: /, /ping, /load, /server_info, /tokenizer_info, /invocations, /generate, /result."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest

import quire
from quire import LLM
from quire.errors import OverloadedError
from quire.server.deferred import DeferredAnswers
from quire.server.responses.errors import ApiError
from tests.server.api_answers import error_of, offline, post, refusal
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "Once upon a time"
WHO = [{"role": "user", "content": "Who are you?"}]
PAGE = "https://page.example"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


# -- what a server says of itself ----------------------------------------------------------------------------------


def test_the_root_says_what_this_is(http: Any) -> None:
    told = http.get("/").json()
    assert (told["name"], told["version"]) == ("quire", quire.__version__)
    assert all(http.get(told[name]).status_code == 200 for name in ("models", "routes"))


def test_ping_is_health_by_another_name(http: Any) -> None:
    for method in ("GET", "POST"):
        response = http.request(method, "/ping")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_load_counts_what_runs(http: Any) -> None:
    end = time.monotonic() + 30
    while http.get("/load").json() != {"server_load": 0, "running": 0, "waiting": 0}:  # others' requests may be ending
        assert time.monotonic() < end
        time.sleep(0.01)
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 3}
    with http.stream("POST", "/v1/completions", json=body) as response:
        arriving = response.iter_lines()
        next(arriving)
        loaded = http.get("/load").json()
        del arriving
    assert loaded["server_load"] == 1 and loaded["running"] + loaded["waiting"] == 3


def test_server_info_has_what_runs_and_nothing_secret(http: Any) -> None:
    told = http.get("/server_info").json()
    assert (told["model"], told["version"], told["max_model_len"]) == ("quire-demo", quire.__version__, 2048)
    assert told["served_model_names"] == ["quire-demo", "org/quire"]
    assert told["images"] is told["adapters"] is True
    assert told["cache"]["block_size"] == 8 and told["server"]["max_n"] == 128
    assert "/" not in json.dumps(told).replace("org/quire", "")  # no folders


def test_tokenizer_info_makes_a_remote_tokenizer(http: Any, llm: LLM) -> None:
    """As lm-eval's: it renders conversations itself, and has the server make them tokens."""
    told, tokenizer = http.get("/tokenizer_info").json(), llm.get_tokenizer()
    for name in ("bos_token", "eos_token", "pad_token"):
        token = getattr(tokenizer, name)
        assert told[name] == token and (token is None or tokenizer.convert_tokens_to_ids(token) is not None)
    assert told["chat_template"] == tokenizer.chat_template
    assert "/" not in json.dumps({name: value for name, value in told.items() if name != "chat_template"})
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(told["chat_template"]).render(
        messages=WHO, add_generation_prompt=True, bos_token=told["bos_token"]
    )
    want = post(http, "/tokenize", messages=WHO)["tokens"]
    assert post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"] == want


# -- /invocations --------------------------------------------------------------------------------------------------


def test_invocations_are_chats_or_completions(http: Any) -> None:
    for path, body in (("/v1/chat/completions", {"messages": WHO}), ("/v1/completions", {"prompt": PROMPT})):
        want = post(http, path, **body, **GREEDY)
        got = post(http, "/invocations", **body, **GREEDY)
        assert (got["object"], got["choices"], got["usage"]) == (want["object"], want["choices"], want["usage"])
        streamed = http.post("/invocations", json={**body, **GREEDY, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")


def test_invocations_take_null_for_nothing(http: Any) -> None:
    want = post(http, "/v1/completions", prompt=PROMPT, **GREEDY)
    assert post(http, "/invocations", messages=None, prompt=PROMPT, **GREEDY)["choices"] == want["choices"]
    want = post(http, "/v1/chat/completions", messages=WHO, **GREEDY)
    assert post(http, "/invocations", messages=WHO, prompt=None, **GREEDY)["choices"] == want["choices"]
    assert refusal(http, "/invocations", messages=None, prompt=None)["param"] == "messages"


def test_invocations_refuse_as_the_routes_do(http: Any) -> None:
    for body, param in (
        ({}, "messages"),
        ({"inputs": "a"}, "messages"),
        ({"messages": WHO, "prompt": PROMPT}, "prompt"),
        ({"messages": WHO, "temperature": "warm"}, "temperature"),
        ({"messages": "Hello"}, "messages"),
        ({"prompt": PROMPT, "n": 0}, "n"),
        ({"prompt": PROMPT, "response_format": {"type": "yaml"}}, "response_format"),
        ({"prompt": PROMPT, "frobnicate": 1}, "frobnicate"),
    ):
        assert refusal(http, "/invocations", **body)["param"] == param
    assert refusal(http, "/invocations", 404, model="nobody", prompt=PROMPT)["code"] == "model_not_found"
    for content in (b"", b"[]", b"{"):
        response = http.post("/invocations", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and error_of(response)


# -- /generate -----------------------------------------------------------------------------------------------------


def lines(http: Any, **body: Any) -> list[list[str]]:
    response = http.post("/generate", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *parts, end = response.text.split("\n")
    assert end == ""
    return [json.loads(part)["text"] for part in parts]


@pytest.mark.parametrize(
    "params",
    [GREEDY, {**GREEDY, "n": 2}, {"temperature": 0.8, "seed": 3, "n": 3, "max_tokens": 12}, {**GREEDY, "stop": [" a"]}],
)
def test_generate_gives_each_text_after_its_prompt(http: Any, llm: LLM, params: dict[str, Any]) -> None:
    want = [PROMPT + output.text for output in offline(llm, PROMPT, **params).outputs]
    assert post(http, "/generate", prompt=PROMPT, **params) == {"text": want}
    streamed = lines(http, prompt=PROMPT, **params)
    assert streamed[-1] == want
    for before, after in pairwise(streamed):
        assert all(new.startswith(old) for old, new in zip(before, after, strict=True))
    ids = post(http, "/tokenize", prompt=PROMPT)["tokens"]
    text = llm.get_tokenizer().decode(ids)
    assert post(http, "/generate", prompt=ids, **params)["text"] == [one.replace(PROMPT, text, 1) for one in want]


def test_generate_escapes_what_json_must(http: Any) -> None:
    prompt = 'Say "é\\ \n\t 星\N{GRINNING FACE}\x7f'
    want = post(http, "/generate", prompt=prompt, **GREEDY)["text"]
    assert lines(http, prompt=prompt, **GREEDY)[-1] == want and want[0].startswith(prompt)


def test_generate_has_defaults_adapters_and_beams(http: Any, llm: LLM) -> None:
    tokens = post(http, "/tokenize", prompt=post(http, "/generate", prompt=PROMPT, temperature=0)["text"][0])["count"]
    assert tokens <= 16 + len(llm.get_tokenizer()(PROMPT)["input_ids"])
    want = PROMPT + offline(llm, PROMPT, "french", **GREEDY).outputs[0].text
    assert post(http, "/generate", prompt=PROMPT, model="french", **GREEDY)["text"] == [want]
    beams = post(http, "/generate", prompt=PROMPT, use_beam_search=True, n=3, max_tokens=5)["text"]
    same = post(http, "/v1/completions", prompt=PROMPT, use_beam_search=True, n=3, max_tokens=5)["choices"]
    assert beams == [PROMPT + choice["text"] for choice in same]
    response = http.post("/generate", json={"prompt": PROMPT, "logprobs": 2, **GREEDY})
    assert response.headers["x-quire-ignored-fields"] == "logprobs"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature"),
        ({"prompt": PROMPT, "frobnicate": 1}, "frobnicate"),
        ({"prompt": PROMPT, "wait": False, "stream": True}, "stream"),
        ({"prompt": PROMPT, "wait": "no"}, "wait"),
        ({"prompt": [5] * 3000}, "prompt"),
        ({"prompt": [5] * 3000, "wait": False}, "prompt"),
        ({"prompt": PROMPT, "n": 1000, "wait": False}, "n"),
    ],
)
def test_what_generate_refuses(http: Any, body: dict[str, Any], param: str) -> None:
    assert refusal(http, "/generate", **body)["param"] == param
    assert refusal(http, "/generate", 404, model="nobody", prompt=PROMPT)["code"] == "model_not_found"


# -- /result -------------------------------------------------------------------------------------------------------


def fetched(http: Any, name: str, **options: Any) -> Any:
    end = time.monotonic() + 30
    while (response := http.get(f"/result/{name}", **options)).status_code == 202:
        assert response.json() == {"request_id": name, "status": "pending"} and response.headers["retry-after"]
        assert time.monotonic() < end
        time.sleep(0.01)
    return response


def test_an_answer_that_is_not_waited_for(http: Any) -> None:
    want = post(http, "/generate", prompt=PROMPT, n=2, **GREEDY)["text"]
    names = [post(http, "/generate", prompt=PROMPT, n=2, wait=False, **GREEDY)["request_id"] for _ in range(3)]
    assert len(set(names)) == 3
    for name in names * 2:  # it may be asked for again
        response = fetched(http, name)
        assert (response.status_code, response.json()) == (200, {"text": want, "request_id": name})


def test_it_is_not_ready_and_then_it_is(http: Any) -> None:
    """It goes on though nobody listens; what it stands in the way of meanwhile is not longer than it."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "wait": False}
    with http.__class__(base_url=http.base_url) as gone:
        name = post(gone, "/generate", **body)["request_id"]
    assert http.get(f"/result/{name}").status_code == 202
    assert http.get("/load").json()["server_load"] == 1
    assert len(post(http, "/tokenize", prompt=fetched(http, name).json()["text"][0])["tokens"]) > 1000


@pytest.mark.parametrize("name", ["nobody", "0" * 32, "a/b", "%00", "x" * 5000])
def test_a_result_that_is_not_there(http: Any, name: str) -> None:
    response = http.get(f"/result/{name}")
    assert response.status_code == 404 and error_of(response)["type"] == "not_found_error"


@pytest.fixture(scope="module")
def keyed(chat_model: Path) -> Iterator[Any]:
    """A server with two keys and one for administration."""
    engine = {"model": str(chat_model), "max_model_len": 128, "num_gpu_blocks_override": 64}
    keys = {"api_keys": ("one", "two"), "admin_api_key": "boss"}
    with LocalServer(engine, **keys, allowed_origins=(PAGE,)) as server, server.http() as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_another_key_does_not_find_a_result(keyed: Any) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "wait": False}
    name = keyed.post("/generate", json=body, headers=bearer("one")).json()["request_id"]
    assert fetched(keyed, name, headers=bearer("one")).status_code == 200
    for key in ("two", "boss"):
        assert keyed.get(f"/result/{name}", headers=bearer(key)).status_code == 404
    assert keyed.get(f"/result/{name}").status_code == 401


def test_only_probes_are_open_without_a_key(keyed: Any) -> None:
    for path in ("/", "/load", "/server_info", "/tokenizer_info", "/result/a", "/metrics", "/openapi.json"):
        assert keyed.get(path).status_code == 401, path
    for path in ("/generate", "/invocations"):
        assert keyed.post(path, json={"prompt": "abc"}).status_code == 401, path
    for path in ("/ping", "/health", "/ready"):
        assert keyed.get(path).status_code == 200, path
    assert keyed.post("/ping").status_code == 200


def test_pages_may_call_where_they_are_allowed_to(http: Any, keyed: Any) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for path in ("/v1/chat/completions", "/generate"):
        answer = keyed.options(path, headers={"Origin": PAGE, **asks})  # without a key: browsers send none here
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        other = keyed.options(path, headers={"Origin": "https://other.example", **asks})
        assert "access-control-allow-origin" not in other.headers
        assert http.options(path, headers={"Origin": PAGE, **asks}).status_code == 405
    answer = keyed.post("/generate", json={"prompt": "abc"}, headers={"Origin": PAGE, **bearer("one")})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Quire-Ignored-Fields" in answer.headers["access-control-expose-headers"]
    assert keyed.post("/generate", json={"prompt": "abc"}, headers={"Origin": PAGE}).status_code == 401


def test_invocations_with_a_large_body(http: Any) -> None:
    """Which a worker reads and checks."""
    messages = [{"role": "user", "content": "red " * 30_000}]
    assert refusal(http, "/invocations", messages=messages)["code"] == "context_length_exceeded"
    assert refusal(http, "/invocations", messages=messages, temperature="warm")["param"] == "temperature"


# -- what is kept of results ---------------------------------------------------------------------------------------


async def _text(text: str) -> dict[str, Any]:
    return {"text": [text]}


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_results_are_bounded_in_number_bytes_and_time() -> None:
    async def check() -> None:
        later = DeferredAnswers(most=3, most_bytes=1000)
        names = []
        for number in range(5):
            names.append(later.add(_text(str(number)), None))
            await asyncio.sleep(0.01)
        assert [later.find(name, None) is not None for name in names] == [False, False, True, True, True]
        big = later.add(_text("x" * 900), None)
        await asyncio.sleep(0.01)
        kept = later.find(big, None)
        assert kept is not None and kept.body is not None and json.loads(kept.body)["text"] == ["x" * 900]
        assert sum(later.find(name, None) is not None for name in names) <= 1
        huge = later.add(_text("x" * 2000), None)
        await asyncio.sleep(0.01)
        assert later.find(huge, None) is None, "it does not fit"
        later = DeferredAnswers(seconds=0.05)
        brief = later.add(_text("brief"), None)
        assert later.find(brief, None) is not None
        end = time.monotonic() + 30
        while later.find(brief, None) is not None:
            assert time.monotonic() < end, "its time is over"
            await asyncio.sleep(0.01)

    asyncio.run(check())


def test_results_that_are_not_ready_are_not_thrown_away() -> None:
    async def check() -> None:
        later = DeferredAnswers(most=2)
        waiting = [later.add(_never(), None) for _ in range(2)]
        with pytest.raises(OverloadedError):
            later.check_room()
        assert all(later.find(name, None) is not None for name in waiting)

    asyncio.run(check())


def test_a_result_may_be_an_error() -> None:
    """What goes wrong later is told to who asks later."""

    async def failing() -> dict[str, Any]:
        raise OverloadedError("too much", 5)

    async def check() -> None:
        later = DeferredAnswers()
        name = later.add(failing(), b"me")
        await asyncio.sleep(0.01)
        kept = later.find(name, b"me")
        assert kept is not None and kept.body is None and kept.error is not None and kept.error.status == 429
        assert later.find(name, b"you") is later.find(name, None) is None

    asyncio.run(check())


def test_a_forgotten_result_leaves_nothing() -> None:
    """No timer until its time would have been over; nor an error's frames, which hold the request."""

    class Body:
        pass

    async def failing(body: Body) -> dict[str, Any]:
        raise ApiError(400, "no")

    async def check() -> None:
        later, body = DeferredAnswers(most=3), Body()
        name, held = later.add(failing(body), None), weakref.ref(body)
        del body
        await asyncio.sleep(0.01)
        kept = later.find(name, None)
        assert kept is not None and kept.error is not None and held() is None
        for number in range(300):
            later.add(_text(str(number)), None)
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        timers: Any = asyncio.get_running_loop()
        assert sum(not timer.cancelled() for timer in timers._scheduled) < 10

    asyncio.run(check())
