"""Which replica a request goes to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from quire.distributed.hints import hints_of, tag_of
from quire.distributed.placement import ranked

REPLICAS = [f"replica{place}" for place in range(16)]


def hints(path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return hints_of(path, json.dumps(body).encode(), ["base"])


def first(replicas: list[str] = REPLICAS, running: dict[str, int] | None = None, **body: Any) -> str:
    (one,) = ranked(replicas, hints(**body), running or {})[0]
    return one


def test_beginnings_say_where_to_go() -> None:
    told = "You are a helpful assistant." + "x" * 600
    same = [hints(model="base", messages=[{"role": "system", "content": told}, {"role": "user", "content": text}])
            for text in ("a", "b")]  # fmt: skip
    assert same[0] == same[1] and set(same[0]) == {"prefix"}
    assert hints(model="base", prompt=told + "a") == hints(model="base", prompt=told + "b")
    assert hints(model="base", prompt=[1] * 600) == hints(model="base", prompt=[1] * 600 + [2])
    assert hints(model="base", prompt="a") != hints(model="base", prompt="b")
    assert hints(model="base", prompt="a") != hints(model="base", prompt="a", cache_salt="s")
    assert hints(model="x", prompt="a")["adapter"] == "x"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": 3, "prompt": {}}', b"\xff\xfe"])
def test_bodies_that_are_none_have_no_adapter(body: bytes) -> None:
    assert "adapter" not in hints_of("/v1/completions", body)


@pytest.mark.parametrize(
    "prompt", [None, 3, [], [[]], [None], ["a"], [{"content": None}], {"a": 1}, [{"content": [{}]}]]
)
def test_any_prompt_has_hints(prompt: Any) -> None:
    assert ranked(REPLICAS, hints(model="x", prompt=prompt), {})


def test_a_large_body_is_not_read() -> None:
    assert hints_of("/v1/completions", b'{"model": "x", "prompt": "' + b"a" * (5 << 20) + b'"}') == {}


def test_what_a_replica_keeps_is_asked_for_there() -> None:
    name = tag_of("replica7") + "ab" * 24
    assert first(previous_response_id=f"resp_{name}", model="base", input="a") == "replica7"
    for path in (f"/v1/responses/resp_{name}", f"/v1/responses/resp_{name}/cancel", f"/result/{name}"):
        assert ranked(REPLICAS, hints_of(path, b""), {})[0] == ["replica7"]
    assert ranked(["replica1"], hints_of(f"/result/{name}", b""), {}) == [["replica1"]]


def test_an_adapter_lives_on_a_few_and_beginnings_on_one_of_them() -> None:
    found = Counter(first(model="x", prompt=f"text {place}") for place in range(200))
    assert 2 <= len(found) <= 4 and set(found) != set(Counter(first(model="y", prompt=str(i)) for i in range(200)))
    assert len({first(model="x", prompt="the same") for _ in range(5)}) == 1
    assert len({first(model="base", prompt=f"text {place}") for place in range(400)}) == 16


def test_one_replica_more_or_less_moves_few() -> None:
    before = [first(model="base", prompt=str(place)) for place in range(400)]
    after = [first([*REPLICAS, "another"], model="base", prompt=str(place)) for place in range(400)]
    moved = [one for old, one in zip(before, after, strict=True) if old != one]
    assert set(moved) == {"another"} and len(moved) < 60


def test_who_has_too_much_to_do_is_passed_over() -> None:
    best = first(model="x", prompt="a")
    busy = {name: 10 for name in REPLICAS}
    assert first(model="x", prompt="a", running=busy) == best
    assert first(model="x", prompt="a", running={**busy, best: 14}) != best
    assert first(model="x", prompt="a", running={best: 3}) == best  # a few it may have in any case


def test_who_is_to_be_avoided_is() -> None:
    best = first(model="x", prompt="a")
    told = {**hints(model="x", prompt="a"), "avoid": [best]}
    assert all(best not in rank for rank in ranked(REPLICAS, told, {}))
    assert ranked([best], told, {})[0] == [best]  # there is no other


def test_without_hints_the_least_loaded_goes_first() -> None:
    ranks = ranked(["a", "b", "c"], {}, {"a": 2, "c": 2})
    assert ranks == [["b"], ["a", "c"]]
    assert ranked([], {"adapter": "x"}, {}) == []


def test_bodies_that_would_hold_a_door_up_are_not_looked_at() -> None:
    assert hints(prompt="a", stop=[[]] * 10_000)["prefix"]
    assert hints(prompt="a", stop=[[]] * 30_000) == {}
