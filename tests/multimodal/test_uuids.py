"""Media that come again by their uuid: the same answers as with their contents, and never another's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestError
from quire.multimodal import MediaByUuid, NamedMedia, ProcessedImage, with_uuids
from quire.types import MediaLayout
from tests.multimodal.open_engine import (
    all_ready,
    ask,
    count_encodes,
    error_of,
    greedy,
    nothing_left,
    one,
    open_llm,
    room_for,
    tokens,
)
from tests.multimodal.tiny_vision import IMAGE, picture

A, B = picture(1, (30, 40)), picture(2, (24, 24))


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return open_llm(path)


@pytest.fixture(autouse=True)
def leaves_nothing(llm: LLM) -> Any:
    yield
    nothing_left(llm)


def given(image: Any, uuid: Any, **more: Any) -> dict[str, Any]:
    return one(image, multi_modal_uuids={"image": [uuid]}, **more)


def by_uuid(uuid: Any, **more: Any) -> dict[str, Any]:
    """Without the image."""
    return {"prompt_token_ids": [5, 6, IMAGE, 7, 8], "multi_modal_uuids": {"image": [uuid]}, **more}


def test_what_came_before_need_not_come_again(llm: LLM) -> None:
    expected = tokens(llm, one(A), one(B))
    assert tokens(llm, given(A, "a"), given(B, "b")) == expected
    encoded = count_encodes(llm)
    prepared = []
    prepare = llm.llm_engine.media.preprocessor._prepare
    llm.llm_engine.media.preprocessor._prepare = lambda *args: prepared.append(args) or prepare(*args)
    try:
        assert tokens(llm, by_uuid("a"), by_uuid("b"), given(None, "a")) == [*expected, expected[0]]
    finally:
        llm.llm_engine.media.preprocessor._prepare = prepare
    assert not encoded and not prepared, "they were looked at again"


def test_both_in_one_call(llm: LLM) -> None:
    expected = tokens(llm, one(A))
    assert tokens(llm, given(A, "together"), by_uuid("together"), by_uuid("together")) == expected * 3


def test_several_in_a_prompt(llm: LLM) -> None:
    ids = [5, IMAGE, 6, IMAGE, 7]
    whole = {"prompt_token_ids": ids, "multi_modal_data": {"image": [A, B]}}
    expected = tokens(llm, whole)
    assert tokens(llm, {**whole, "multi_modal_uuids": {"image": ["s1", None]}}) == expected
    again = {"prompt_token_ids": ids, "multi_modal_data": {"image": [None, B]}}
    assert tokens(llm, {**again, "multi_modal_uuids": {"image": ["s1", "s2"]}}) == expected
    assert tokens(llm, {"prompt_token_ids": ids, "multi_modal_uuids": {"image": ["s1", "s2"]}}) == expected


def test_other_contents_take_its_place(llm: LLM) -> None:
    """What comes is always looked at: a uuid is no proof."""
    (first,), (second,) = tokens(llm, one(A)), tokens(llm, one(B))
    assert tokens(llm, given(A, "changes")) == [first]
    assert tokens(llm, given(B, "changes"), by_uuid("changes")) == [second, second]


def test_bad_contents_leave_nothing_behind(llm: LLM) -> None:
    failed, after = ask(llm, [given(b"no image", "bad"), by_uuid("bad")])
    assert "image 0" in error_of(failed) and "image 0" in error_of(after)
    with pytest.raises(RequestError, match=r"request \d+: image 0: nothing is known of the uuid 'bad'"):
        ask(llm, by_uuid("bad"))


def test_a_salt_has_its_own(llm: LLM) -> None:
    tokens(llm, given(A, "salted", cache_salt="x"))
    for other in ({}, {"cache_salt": "y"}):
        with pytest.raises(RequestError, match="nothing is known of the uuid 'salted'"):
            ask(llm, by_uuid("salted", **other))
    assert tokens(llm, by_uuid("salted", cache_salt="x")) == tokens(llm, one(A))


def test_settings_are_the_requests_own(llm: LLM, kind: Any) -> None:
    """What was made with others is not taken."""
    changed = {"mm_processor_kwargs": {"do_normalize": False}}
    tokens(llm, given(A, "set"))
    assert tokens(llm, by_uuid("set", **changed)) == tokens(llm, one(A, **changed)) != tokens(llm, one(A))


def test_features_that_were_evicted(path: str, kind: Any) -> None:
    """Contents are kept as they came, whatever their caller does to them, and are encoded again."""
    llm = open_llm(path, media_cache_bytes=room_for(kind.most_tokens))
    expected = tokens(llm, one(A))
    mutable = np.asarray(A).copy()
    llm.llm_engine.media._uuids._capacity = 1 << 20
    assert tokens(llm, given(mutable, "kept")) == expected
    mutable[:] = 0
    for other in (B, picture(3, (30, 40))):
        tokens(llm, one(other))
        assert tokens(llm, by_uuid("kept")) == expected


def test_evicted_between_its_arrival_and_its_turn(path: str, kind: Any) -> None:
    llm = open_llm(path, media_cache_bytes=room_for(kind.most_tokens))
    engine = llm.llm_engine
    engine.media._uuids._capacity = 1 << 20
    (expected,) = tokens(llm, given(A, "late"))
    engine.add_request("late", by_uuid("late"), greedy())
    all_ready(engine)
    engine.scheduler.encoder.features.clear()
    answer: list[int] = []
    while engine.has_unfinished_requests():
        answer = [list(output.outputs[0].token_ids) for output in engine.step()][-1:] or answer
    assert answer == [expected]


BAD = [
    ({"image": ["x", "y"]}, "has 2 for 'image', and multi_modal_data 1"),
    ({"image": [5]}, "must be a text of 1 to 256 characters"),
    ({"image": [""]}, "must be a text"),
    ({"image": ["x" * 257]}, "must be a text"),
    (["x"], "multi_modal_uuids takes"),
    ({"video": ["x"]}, "video"),
]


@pytest.mark.parametrize(("uuids", "message"), BAD)
def test_bad_uuids_are_named(llm: LLM, uuids: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        ask(llm, {**one(A), "multi_modal_uuids": uuids})
    assert message in str(error.value)


def test_contents_must_be_there_or_known(llm: LLM) -> None:
    with pytest.raises(RequestError, match="image 0: nothing is known of the uuid 'nobody'"):
        ask(llm, by_uuid("nobody"))
    with pytest.raises(RequestError, match="image 0 is None: that takes a uuid"):
        ask(
            llm,
            {
                "prompt_token_ids": [IMAGE],
                "multi_modal_data": {"image": [None]},
                "multi_modal_uuids": {"image": [None]},
            },
        )


def test_parts_of_messages(llm: LLM) -> None:
    """As vLLM has them; a part's uuid alone names what came with it before."""
    from quire.platform.inputs.chat_messages import check_messages

    file = io.BytesIO()
    A.save(file, "PNG")
    parts = [
        {"type": "image", "image": file.getvalue(), "uuid": "p"},
        {"type": "image_url", "image_url": None, "uuid": "p"},
        {"type": "image_url", "uuid": "p"},
        {"type": "image_pil", "image_pil": A, "uuid": "q"},
    ]
    _, sources = check_messages([{"role": "user", "content": parts}], True)
    assert [(source.uuid, source.source is None) for source in sources] == [
        ("p", False), ("p", True), ("p", True), ("q", False),
    ]  # fmt: skip
    prompt = {"prompt_token_ids": [IMAGE, 5, IMAGE], "multi_modal_data": {"image": sources[:2]}}
    assert tokens(llm, prompt) == tokens(
        llm, {"prompt_token_ids": [IMAGE, 5, IMAGE], "multi_modal_data": {"image": [A, A]}}
    )
    with pytest.raises(RequestError, match="uuid must be a text"):
        check_messages([{"role": "user", "content": [{"type": "image_pil", "image_pil": A, "uuid": 5}]}], True)


def test_a_list_of_frames_is_one_video() -> None:
    frames = [A, B]
    (video,) = with_uuids({"video": frames}, {"video": "v"})["video"]
    assert (video.uuid, video.kind, len(video.source)) == ("v", "video", 2)
    for uuids in ("v", ["v"]):
        (video,) = with_uuids({"video": [A]}, {"video": uuids})["video"]
        assert video.source == [A]
    first, second = with_uuids({"video": [b"1", b"2"]}, {"video": ["v", None]})["video"]
    assert (first.source, second) == (b"1", b"2")
    with pytest.raises(RequestError, match="has 1 for 'image', and multi_modal_data 2"):
        with_uuids({"image": frames}, {"image": "v"})


# -- the account ---------------------------------------------------------------------------------------------------


def made(source: Any) -> ProcessedImage:
    return ProcessedImage(b"d", MediaLayout(1), None, source)


def test_what_was_told_before_is_not_taken_for_what_came_since() -> None:
    known = MediaByUuid(100)
    first, again, second = NamedMedia("a", b"first"), NamedMedia("a", None), NamedMedia("a", b"second")
    told = [known.resolve([media], None, 0)[0] for media in (first, again, second)]
    assert told == [b"first", b"first", b"second"]
    for media, source in zip((again, first, second), (told[1], told[0], told[2]), strict=True):
        known.learn([media], None, 0, [made(source)])
    (found,) = known.resolve([again], None, 0)
    assert found.source == b"second" and known.resolve([again], None, 1) == [b"second"]


def test_the_least_recently_used_goes_first() -> None:
    known = MediaByUuid(100)
    for name in "abc":
        media = [NamedMedia(name, bytes(40))]
        known.learn(media, None, 0, [made(source) for source in known.resolve(media, None, 0)])
        if name == "b":
            known.resolve([NamedMedia("a", None)], None, 0)
    assert len(known) == 2 and known.bytes == 80
    known.resolve([NamedMedia("a", None), NamedMedia("c", None)], None, 0)
    with pytest.raises(RequestError, match="'b'"):
        known.resolve([NamedMedia("b", None)], None, 0)
    known.resolve([NamedMedia("large", bytes(101))], None, 0)
    assert len(known) == 0 == known.bytes
