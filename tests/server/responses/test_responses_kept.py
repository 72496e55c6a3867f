"""Responses that are kept: gone on from, asked for, listed, cancelled, deleted; made in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseItemList

from tests.server.api_answers import error_of, refusal, strict
from tests.server.api_server import LocalServer
from tests.server.responses.helpers import (
    GREEDY,
    MODEL,
    PATH,
    TALE,
    WHO,
    events_of,
    put_together,
    respond,
    stream,
    text_of,
    without_ids,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ENDLESS: dict[str, Any] = {"input": TALE, "ignore_eos": True, **GREEDY}
IGNORED = "x-quire-ignored-fields"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(response_store_bytes=1 << 20) as server:
        yield server
        server.until_idle()
        assert all(stored.body is not None for stored in server.app.state.context.responses._kept.values())


@pytest.fixture
def http(server: LocalServer) -> Iterator[Any]:
    with server.http() as http:
        yield http


@pytest.fixture
def client(server: LocalServer) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def until_over(http: Any, name: str) -> dict[str, Any]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        response = http.get(f"{PATH}/{name}")
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        strict(Response, body)
        if body["status"] not in ("queued", "in_progress"):
            return body
        time.sleep(0.02)
    raise AssertionError(f"{name} is not over")


def test_one_goes_on_from_another(http: Any) -> None:
    first = respond(http, input=TALE, max_output_tokens=16, **GREEDY)
    second = respond(http, input=WHO, previous_response_id=first["id"], instructions="Be brief.", **GREEDY)
    third = respond(http, input="And you?", previous_response_id=second["id"], **GREEDY)
    items: list[Any] = [{"role": "user", "content": TALE}, *first["output"], {"role": "user", "content": WHO}]
    told = {"role": "system", "content": "Be brief."}
    want = respond(http, input=[told, *items], store=False, **GREEDY)
    assert without_ids(second["output"]) == without_ids(want["output"])
    assert second["previous_response_id"] == first["id"]
    items += [*second["output"], {"role": "user", "content": "And you?"}]
    want = respond(http, input=items, store=False, **GREEDY)  # the instructions do not go on
    assert without_ids(third["output"]) == without_ids(want["output"])
    assert third["usage"]["input_tokens"] == want["usage"]["input_tokens"]


def test_streams_are_kept_as_whole_answers_are(http: Any) -> None:
    events = stream(http, input=WHO, **GREEDY)
    final = events[-1]["response"]
    assert final["store"] is True
    kept = http.get(f"{PATH}/{final['id']}").json()
    assert kept == final
    whole = respond(http, input=WHO, **GREEDY)
    assert http.get(f"{PATH}/{whole['id']}").json() == whole
    assert without_ids(whole["output"]) == without_ids(kept["output"])


def test_what_is_not_to_be_kept_is_not(http: Any) -> None:
    answer = respond(http, input=WHO, store=False, **GREEDY)
    assert answer["store"] is False
    error = error_of(http.get(f"{PATH}/{answer['id']}"))
    assert error["type"] == "not_found_error" and error["param"] == "response_id"
    error = refusal(http, PATH, input=WHO, previous_response_id=answer["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_references_to_items(http: Any) -> None:
    first = respond(http, input=[{"role": "user", "content": TALE}], max_output_tokens=16, **GREEDY)
    listed = http.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    references = [{"type": "item_reference", "id": item["id"]} for item in (*listed, *first["output"])]
    ask = {"role": "user", "content": WHO}
    answer = respond(http, input=[*references, ask], **GREEDY)
    want = respond(http, input=WHO, previous_response_id=first["id"], **GREEDY)
    assert text_of(answer) == text_of(want)
    kept = http.get(f"{PATH}/{answer['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert without_ids(kept[:2]) == without_ids([*listed, *first["output"]])
    for name in ("msg_nothing_0", "msg_", "x", first["output"][0]["id"] + "0"):
        assert refusal(http, PATH, input=[{"type": "item_reference", "id": name}, ask])["param"] == "input"


def test_a_list_of_input_items(http: Any) -> None:
    given = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": WHO},
    ]
    answer = respond(http, input=given, max_output_tokens=2)
    path = f"{PATH}/{answer['id']}/input_items"
    everything = http.get(path, params={"order": "asc"}).json()
    strict(ResponseItemList, everything)
    assert [item["content"][0]["text"] for item in everything["data"]] == ["a", "b", "c", WHO]
    assert (everything["has_more"], everything["first_id"]) == (False, everything["data"][0]["id"])
    newest = http.get(path, params={"limit": 3}).json()
    assert newest["data"] == everything["data"][:0:-1] and newest["has_more"] is True
    rest = http.get(path, params={"after": newest["last_id"]}).json()
    assert rest["data"] == everything["data"][:1] and rest["has_more"] is False
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "odd"}, {"after": "nobody"}):
        (field,) = wrong
        assert error_of(http.get(path, params=wrong))["param"] == field


def test_deleted(http: Any, client: OpenAI) -> None:
    first = respond(http, input=WHO, **GREEDY)
    second = respond(http, input=WHO, previous_response_id=first["id"], **GREEDY)
    assert http.delete(f"{PATH}/{first['id']}").json() == {"id": first["id"], "object": "response", "deleted": True}
    for response in (http.get(f"{PATH}/{first['id']}"), http.delete(f"{PATH}/{first['id']}")):
        assert response.status_code == 404
    error = refusal(http, PATH, input=WHO, previous_response_id=second["id"])
    assert f"'{second['id']}' goes on from" in error["message"]
    assert client.responses.retrieve(second["id"]).id == second["id"]
    assert client.responses.delete(second["id"]) is None


# -- in the background ---------------------------------------------------------------------------------------------


def test_in_the_background(http: Any) -> None:
    begun = respond(http, input=WHO, background=True, **GREEDY)
    assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
    done = until_over(http, begun["id"])
    assert (done["status"], done["store"]) == ("completed", True)
    assert text_of(done) == text_of(respond(http, input=WHO, **GREEDY))
    assert respond(http, input=WHO, previous_response_id=begun["id"], **GREEDY)["status"] == "completed"
    error = error_of(http.get(f"{PATH}/{begun['id']}", params={"stream": "true"}))
    assert error["param"] == "stream"


def test_a_stream_in_the_background_can_be_asked_for_again(http: Any, client: OpenAI) -> None:
    events = stream(http, input=WHO, background=True, **GREEDY)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and put_together(events) == final["output"]
    path = f"{PATH}/{final['id']}"
    assert http.get(path).json() == final
    again = http.get(path, params={"stream": "true"})
    assert again.headers["content-type"].startswith("text/event-stream") and events_of(again.text) == events
    for after in (0, 5, len(events) - 2, len(events) - 1, 10_000):
        rest = http.get(path, params={"stream": "true", "starting_after": after}).text
        assert events_of(rest, after + 1) == events[after + 1 :]
    assert error_of(http.get(path, params={"starting_after": 1}))["param"] == "starting_after"
    with client.responses.stream(response_id=final["id"]) as stream_again:
        assert stream_again.get_final_response().output_text == text_of(final)


def test_who_leaves_a_stream_in_the_background_finds_it_again(http: Any) -> None:
    with http.stream("POST", PATH, json={"input": TALE, "background": True, "stream": True, **GREEDY}) as response:
        lines = response.iter_lines()
        next(lines)
        name = next(lines).split('"id":"')[1].split('"')[0]
    text = http.get(f"{PATH}/{name}", params={"stream": "true"}).text  # as it goes on
    assert events_of(text)[-1]["response"] == until_over(http, name)
    assert until_over(http, name)["status"] == "completed"


def test_cancelled_in_the_background(http: Any) -> None:
    begun = respond(http, background=True, **ENDLESS)
    end = time.monotonic() + 60
    while not text_of(http.get(f"{PATH}/{begun['id']}").json()):  # it can be seen growing
        assert time.monotonic() < end
        time.sleep(0.01)
    cancelled = http.post(f"{PATH}/{begun['id']}/cancel").json()
    strict(Response, cancelled)
    assert (
        cancelled["status"] == "cancelled" and text_of(cancelled) and cancelled["output"][0]["status"] == "incomplete"
    )
    assert cancelled["usage"]["output_tokens"] > 0
    for again in (http.get(f"{PATH}/{begun['id']}"), http.post(f"{PATH}/{begun['id']}/cancel")):
        assert again.json() == cancelled
    done = respond(http, input=WHO, **GREEDY)
    assert http.post(f"{PATH}/{done['id']}/cancel").json() == done
    assert http.post(f"{PATH}/resp_nobody/cancel").status_code == 404


def test_cancelled_while_it_streams(http: Any, server: LocalServer) -> None:
    for body in ({}, {"background": True}):
        with http.stream("POST", PATH, json={**ENDLESS, "stream": True, **body}) as response:
            text, cancelled = "", None
            for chunk in response.iter_text():
                text += chunk
                if cancelled is None and "output_text.delta" in text:
                    name = text.split('"id":"')[1].split('"')[0]
                    with server.http() as other:
                        cancelled = other.post(f"{PATH}/{name}/cancel").json()
        events = events_of(text)
        assert cancelled is not None and events[-1]["response"] == cancelled
        assert (events[-1]["type"], cancelled["status"]) == ("response.incomplete", "cancelled")
        assert put_together(events) == cancelled["output"]


def test_deleted_while_it_is_made(http: Any, server: LocalServer) -> None:
    begun = respond(http, background=True, **ENDLESS)
    assert http.delete(f"{PATH}/{begun['id']}").status_code == 200
    assert http.get(f"{PATH}/{begun['id']}").status_code == 404
    server.until_idle()


def test_who_has_gone_leaves_nothing(http: Any, server: LocalServer) -> None:
    store = server.app.state.context.responses
    before = set(store._kept)
    with http.stream("POST", PATH, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        (name,) = set(store._kept) - before
    server.until_idle()
    assert name not in store._kept


def test_a_name_that_the_client_gives(http: Any) -> None:
    answer = respond(http, input=WHO, request_id="mine", **GREEDY)
    assert answer["id"] == "resp_mine" and http.get(f"{PATH}/resp_mine").json() == answer
    error = refusal(http, PATH, input=WHO, request_id="mine")
    assert error["param"] == "request_id" and "already" in error["message"]
    assert respond(http, input=WHO, request_id="mine", store=False, **GREEDY)["id"] == "resp_mine"


def test_faults_in_the_background_are_told(http: Any) -> None:
    """What is wrong with the request itself has its status at once."""
    error = refusal(http, PATH, input="long " * 100_000, background=True)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert refusal(http, PATH, input=WHO, background=True, temperature=-1)["param"] == "temperature"


# -- bounds and owners ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_kept() -> None:
    with LocalServer(response_store_bytes=6000) as server, server.http() as http:
        large = [{"role": "user", "content": [{"type": "input_text", "text": WHO, "x": None}]}] * 60
        store = server.app.state.context.responses
        for body in ({"store": True}, {"background": True}):
            error = refusal(http, PATH, input=large, max_output_tokens=2, **body)
            assert error["param"] == "store" and "--response-store-bytes" in error["message"]
        answer = http.post(PATH, json={"input": large, "max_output_tokens": 2})
        assert answer.headers[IGNORED] == "store" and answer.json()["store"] is False
        assert http.get(f"{PATH}/{answer.json()['id']}").status_code == 404
        # An endless stream's events do not fit: it fails, and says so.
        text = http.post(PATH, json={**ENDLESS, "background": True, "stream": True}).text
        assert '"response.failed"' not in text and len(store) == 1
        (stored,) = store._kept.values()
        failed = until_over(http, stored.id)
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
        assert "--response-store-bytes" in failed["error"]["message"]
        for _ in range(5):
            respond(http, input=WHO, **GREEDY)
            assert store.bytes <= store.most_bytes
        server.until_idle()


def test_another_key_does_not_find_it() -> None:
    with (
        LocalServer(response_store_bytes=1 << 20, api_keys=("ann", "bob")) as server,
        server.client(api_key="ann") as ann,
        server.client(api_key="bob") as bob,
    ):
        answer = ann.responses.create(model=MODEL, input=WHO, temperature=0)
        assert ann.responses.retrieve(answer.id) == answer
        item: Any = {"type": "item_reference", "id": answer.output[0].id}
        for ask in (
            lambda: bob.responses.retrieve(answer.id),
            lambda: bob.responses.delete(answer.id),
            lambda: bob.responses.cancel(answer.id),
            lambda: bob.responses.input_items.list(answer.id),
            lambda: bob.responses.create(model=MODEL, input=WHO, previous_response_id=answer.id),
            lambda: bob.responses.create(model=MODEL, input=[item]),
        ):
            with pytest.raises(Exception, match=r"there is no"):
                ask()


def test_many_at_once(server: LocalServer) -> None:
    """Chains side by side, each of which goes its own way."""

    async def chain(client: Any, number: int) -> list[str]:
        texts, previous = [], None
        for step in range(3):
            answer = await client.responses.create(
                model=MODEL, input=f"Tell me of a {('star', 'circle', 'cave')[number % 3]}. {step}",
                previous_response_id=previous, temperature=0, max_output_tokens=8, background=number % 2 == 1,
            )  # fmt: skip
            while answer.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                answer = await client.responses.retrieve(answer.id)
            texts.append(answer.output_text)
            previous = answer.id
        return texts

    async def run(numbers: list[int], together: bool) -> list[list[str]]:
        async with server.async_client() as client:
            if together:
                return list(await asyncio.gather(*(chain(client, number) for number in numbers)))
            return [await chain(client, number) for number in numbers]

    numbers = list(range(6))
    assert asyncio.run(run(numbers, True)) == asyncio.run(run(numbers, False))


def test_without_the_option_nothing_is_there() -> None:
    with LocalServer() as server, server.http() as http:
        answer = http.post(PATH, json={"input": WHO, "store": True, "max_output_tokens": 2})
        assert answer.headers[IGNORED] == "store" and answer.json()["store"] is False
        response = http.get(f"{PATH}/{answer.json()['id']}")
        assert response.status_code == 404 and "--response-store-bytes" in error_of(response)["message"]
        assert server.app.state.context.responses.bytes == 0
