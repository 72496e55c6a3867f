"""Room for features and pixels: what is evicted is prepared again, and what is over is in nobody's way."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multimodal.open_engine import (
    all_ready,
    alone,
    ask,
    count_encodes,
    drive,
    error_of,
    greedy,
    held_back,
    nothing_left,
    one,
    open_llm,
    prompt,
    room_for,
    tokens,
    until,
    wait_until_idle,
)
from tests.multimodal.tiny_vision import IMAGE, picture

A, B, C = (picture(number, (24, 24)) for number in (1, 2, 3))
ONE = room_for(9)  # the features of one image, and no more


def test_an_image_that_comes_again_after_another_needs_no_room_for_both(path, kind):
    """A hang once: the request held the first image for its second place, and waited for room for the other."""
    given = prompt([5, IMAGE, 6, IMAGE, 7, IMAGE, 8], [A, B, A])
    llm = open_llm(path, media_cache_bytes=room_for(kind.most_tokens))
    assert tokens(llm, given) == alone(path, given)
    nothing_left(llm)


def test_pixels_of_a_request_that_is_over_are_in_nobodys_way(llava, no_collector):
    """A hang once: nothing was prepared while they counted, and only the garbage collector found them."""
    llm = open_llm(llava, media_cache_bytes=ONE, max_num_seqs=1)
    engine = llm.llm_engine
    engine.add_request("first", prompt([5] * 9), greedy(30))
    engine.add_request("second", one(A), greedy())
    all_ready(engine)
    assert engine.media.preprocessor.pixel_bytes > engine.config.media.pixel_bytes
    engine.abort_request(["first", "second"])
    assert engine.media.preprocessor.pixel_bytes == 0
    assert tokens(llm, one(B)) == alone(llava, one(B))
    nothing_left(llm)


def test_pixels_of_an_image_in_the_prefix_cache_are_in_nobodys_way(llava, no_collector):
    llm = open_llm(llava, media_cache_bytes=ONE, block_size=4)
    engine, given = llm.llm_engine, one(A, after=range(7, 12))
    assert tokens(llm, given) and tokens(llm, one(B))
    engine.add_request("long", given, greedy(150))  # its features are gone, its blocks are not
    until(engine, lambda: "long" in engine.core.requests and engine.core.requests["long"].sequences[0].output_ids)
    assert engine.core.requests["long"].metrics.num_cached_tokens == 12
    assert engine.media.preprocessor.pixel_bytes == 0
    engine.add_request("short", one(C), greedy())
    all_ready(engine)
    assert "long" in engine.core.requests and engine.core.requests["short"].media[0].pixels is not None
    drive(engine)
    nothing_left(llm)


def test_an_image_larger_than_the_budget_is_refused(path, kind):
    for room, fits in ((kind.most_tokens, True), (3, False), (0, False)):
        llm = open_llm(path, media_cache_bytes=max(1, room_for(room)))
        refused, text = ask(llm, [prompt([5, IMAGE, 6], [A]), prompt([5, 6])])
        assert text.outputs[0].finish_reason == "length"
        if fits:
            assert refused.outputs[0].finish_reason == "length"
        else:
            assert "image 0 takes" in error_of(refused) and f"the features of {room} fit" in error_of(refused)
            assert "media_cache_bytes" in error_of(refused)
        nothing_left(llm)


def test_preempted_requests_whose_features_were_evicted_end_as_they_would(path, kind):
    images = [picture(number, (24, 24)) for number in range(6)]
    prompts = [prompt([5, IMAGE, 6, IMAGE, 7], [image, images[0]]) for image in images]
    ample = open_llm(path, enable_prefix_caching=False)
    expected = [ask(ample, given, greedy(30))[0] for given in prompts]
    length = len(expected[0].prompt_token_ids)
    llm = open_llm(
        path, features=(length - 3) // 2, block_size=4, max_num_batched_tokens=13,
        num_gpu_blocks_override=2 * (length // 4) + 12, enable_prefix_caching=False,
    )  # fmt: skip
    engine, preprocessor, again = llm.llm_engine, llm.llm_engine.media.preprocessor, []
    submit = preprocessor.submit
    preprocessor.submit = lambda *job, urgent=False, **more: (again.append(urgent), submit(*job, urgent, **more))
    for name, given in enumerate(prompts):
        engine.add_request(str(name), given, greedy(30))
    all_ready(engine)
    outputs = drive(engine)
    for name, output in enumerate(expected):
        assert outputs[str(name)].outputs[0].token_ids == output.outputs[0].token_ids
    assert engine.scheduler.num_preemptions > 0 and any(again)
    nothing_left(llm)


@pytest.mark.parametrize("change", ["none", "pixels", "gone", "shape"])
def test_a_source_that_changes_harms_its_request_alone(llava, change):
    """Found in the features when it came, evicted since, and no longer what it was when it is wanted again."""
    llm = open_llm(llava, features=9, max_num_seqs=1, enable_prefix_caching=False)
    engine, source = llm.llm_engine, np.asarray(A).copy()
    given, expected = prompt([5, IMAGE, IMAGE, 6], [C, source]), alone(llava, prompt([5, IMAGE, IMAGE, 6], [C, A]))
    assert tokens(llm, one(A))
    for name, asked in (("before", one(B)), ("changing", given), ("after", one(C))):
        engine.add_request(name, asked, greedy())
    all_ready(engine)
    assert engine.core.requests["changing"].media[1].pixels is None, "its features were there"
    if change == "pixels":
        source[0, 0] ^= 1
    elif change == "gone":
        source.dtype = np.int8
    elif change == "shape":
        source.shape = (12, 48, 3)
    outputs = drive(engine)
    if change == "none":
        assert [outputs["changing"].outputs[0].token_ids] == expected
    else:
        assert "request changing: image 1" in error_of(outputs["changing"])
        assert ("int8" if change == "gone" else "has changed since it was given") in error_of(outputs["changing"])
    assert [outputs[name].outputs[0].token_ids for name in ("before", "after")] == alone(llava, one(B), one(C))
    nothing_left(llm)


def test_a_file_is_read_once(llava, tmp_path):
    A.save(tmp_path / "a.png")
    llm = open_llm(
        llava, features=9, max_num_seqs=1, enable_prefix_caching=False, allowed_local_media_path=str(tmp_path)
    )
    engine, calls = llm.llm_engine, count_encodes(llm)
    assert tokens(llm, one(A))
    for name, asked in (("before", one(B)), ("file", one((tmp_path / "a.png").as_uri()))):
        engine.add_request(name, asked, greedy())
    all_ready(engine)
    (tmp_path / "a.png").unlink()
    assert [drive(engine)["file"].outputs[0].token_ids] == alone(llava, one(A))
    assert len(calls) == 3, "it was prepared again, and encoded again"
    nothing_left(llm)


def test_aborted_while_an_image_is_prepared_again(llava, no_collector):
    llm = open_llm(llava, features=9, max_num_seqs=1, enable_prefix_caching=False)
    engine = llm.llm_engine
    assert tokens(llm, one(A))
    engine.add_request("before", one(B), greedy())
    engine.add_request("again", one(A), greedy())
    all_ready(engine)
    with held_back(llm, lambda source: source is A) as gate:
        until(engine, lambda: engine.core.requests["again"].media[0].reprocessing)
        engine.abort_request(["before", "again"])
        gate.set()
        wait_until_idle(llm)
    assert engine.step() == [] and engine.media.preprocessor.pixel_bytes == 0
    nothing_left(llm)
