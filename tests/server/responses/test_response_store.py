"""The store alone: its bytes are counted exactly, and the least used goes first."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import OverloadedError
from quire.server.response_store import ResponseStore, StoredResponse
from quire.server.responses.errors import ApiError

OVERHEAD = 1024


def kept(store: ResponseStore, name: str, size: int = 100, previous: str | None = None, **more: Any) -> StoredResponse:
    """A response that has ended, of so many bytes, half of them its input's."""
    stored = StoredResponse(name, more.pop("owner", None), previous, b"i" * (size // 2), **more)
    store.begin(stored)
    store.finish(stored, b"b" * (size - size // 2))
    return stored


def held(store: ResponseStore) -> int:
    """What its bytes should be, counted anew."""
    total = 0
    for stored in store._kept.values():
        total += OVERHEAD + len(stored.items) + len(stored.body or b"")
        total += sum(len(event) + 64 for event in stored.events or ())
    return total


def test_the_least_used_goes_first() -> None:
    store = ResponseStore(3 * (OVERHEAD + 100))
    for name in "abc":
        kept(store, name)
    assert store.find("a", None) is not None
    kept(store, "d")
    assert [store.find(name, None) is not None for name in "abcd"] == [True, False, True, True]
    assert store.bytes == held(store) == store.most_bytes


def test_another_owner_finds_nothing() -> None:
    store = ResponseStore(1 << 20)
    kept(store, "a", owner=b"ann")
    assert store.find("a", b"bob") is None and store.find("a", None) is None and store.find("a", b"ann") is not None
    with pytest.raises(ApiError, match="there is no response 'a'"):
        store.chain("a", b"bob", "previous_response_id")


def test_chains() -> None:
    store = ResponseStore(1 << 20)
    kept(store, "a")
    b = kept(store, "b", previous="a")
    kept(store, "c", previous="b")
    assert [one.id for one in store.chain("c", None, "f")] == ["a", "b", "c"]
    store.forget(b)
    with pytest.raises(ApiError, match="f: there is no response 'b', which 'c' goes on from") as error:
        store.chain("c", None, "f")
    assert (error.value.status, error.value.param) == (400, "f")
    store.begin(StoredResponse("d", None, None, b""))
    with pytest.raises(ApiError, match="in the making"):
        store.chain("d", None, "f")


def test_a_chain_that_is_gone_on_from_is_not_forgotten_before_others() -> None:
    store = ResponseStore(4 * (OVERHEAD + 100))
    kept(store, "a")
    kept(store, "b", previous="a")
    kept(store, "x")
    kept(store, "y")
    store.chain("b", None, "f")
    kept(store, "z")
    assert [store.find(name, None) is not None for name in "abxyz"] == [True, True, False, True, True]


def test_what_is_in_the_making_stays() -> None:
    store = ResponseStore(2 * (OVERHEAD + 100))
    making = StoredResponse("a", None, None, b"i" * 100)
    store.begin(making)
    kept(store, "b")
    kept(store, "c")
    assert store.find("a", None) is making and store.find("b", None) is None
    other = StoredResponse("d", None, None, b"i" * 100)
    store.begin(other)
    with pytest.raises(OverloadedError, match="--response-store-bytes"):
        store.begin(StoredResponse("e", None, None, b""))
    assert not store.finish(making, b"b") and not making.kept  # there is no place for its body
    assert store.finish(other, b"b") and len(store) == 1 and store.bytes == held(store)


def test_what_is_too_large_and_names_that_are_taken() -> None:
    store = ResponseStore(OVERHEAD + 100)
    with pytest.raises(ApiError, match="takes 1125 bytes and all that is kept may take 1124"):
        store.begin(StoredResponse("a", None, None, b"i" * 101))
    kept(store, "a")
    with pytest.raises(ApiError, match="request_id: there is a response 'a' already"):
        store.begin(StoredResponse("a", b"other", None, b""))
    assert store.bytes == held(store) == OVERHEAD + 100


def test_events_are_counted_and_given_back() -> None:
    store = ResponseStore(OVERHEAD + 1000)
    stored = StoredResponse("a", None, None, b"", events=[])
    store.begin(stored)
    while store.append(stored, b"e" * 36):
        assert store.bytes == held(store) <= store.most_bytes
    assert stored.events is not None and len(stored.events) == 10
    store.drop_events(stored)
    assert store.bytes == held(store) == OVERHEAD and store.finish(stored, b"b")


def test_who_waits_is_woken() -> None:
    async def wait() -> None:
        store = ResponseStore(1 << 20)
        stored = StoredResponse("a", None, None, b"", events=[])
        store.begin(stored)
        for change in (lambda: store.append(stored, b"e"), lambda: store.complete(stored)):
            waiting = asyncio.ensure_future(stored.more())
            await asyncio.sleep(0)
            change()
            await asyncio.wait_for(waiting, 5)

    asyncio.run(wait())


STEPS = ["begin", "finish", "append", "forget", "find"]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(STEPS), st.integers(0, 3000)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_bytes_are_counted_exactly_whatever_is_done(steps: list[tuple[str, str, int]]) -> None:
    store = ResponseStore(8000)
    everything: dict[str, StoredResponse] = {}
    for name, step, size in steps:
        stored = everything.get(name)
        if step == "begin":
            new = StoredResponse(name, None, None, b"i" * size, events=[])
            try:
                store.begin(new)
                everything[name] = new
            except (ApiError, OverloadedError):
                pass
        elif step == "find":
            store.find(name, None)
        elif stored is not None and step == "append":
            store.append(stored, b"e" * size)
        elif stored is not None and step == "finish" and stored.body is None:
            store.finish(stored, b"b" * size)
        elif stored is not None and step == "forget":
            store.forget(stored)
        assert 0 <= store.bytes == held(store) <= store.most_bytes
        assert all(one.kept for one in store._kept.values())


def test_memory_is_what_was_counted() -> None:
    most = 4 << 20
    store = ResponseStore(most)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(8000):
            # Not one object again and again.
            stored = StoredResponse(f"resp_{number:048x}", bytes(32), None, bytes(number % 700))
            store.begin(stored)
            store.finish(stored, bytes(number % 900))
        del stored
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) > 1000 and store.bytes <= most
    assert taken <= most
