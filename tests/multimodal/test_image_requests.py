"""A request's way with its images: aborted at any place, in order of arrival, scored."""

from __future__ import annotations

import gc
import json
import re
import shutil
import threading

import pytest

from quire import LLM, RequestError, SamplingParams
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
    tokens,
    until,
    wait_until_idle,
)
from tests.multimodal.tiny_vision import IMAGE, picture

A, B, C = (picture(number, (24, 24)) for number in (1, 2, 3))


# Aborted


def test_aborted_while_its_images_are_prepared(llava):
    llm = open_llm(llava)
    engine, expected = llm.llm_engine, alone(llava, one(A), one(B))
    with held_back(llm) as gate:
        engine.add_request("a", one(C), greedy())
        engine.add_request("b", one(B), greedy())
        with pytest.raises(RequestError, match="unfinished request of this id"):
            engine.add_request("a", one(A), greedy())
        assert engine.step() == [] and engine.get_num_unfinished_requests() == 2
        engine.abort_request(["a", "no such"])
        assert engine.get_num_unfinished_requests() == 1
        engine.add_request("a", one(A), greedy())  # the name is free again, and the old job still runs
        engine.step()
        gate.set()
    outputs = drive(engine)
    assert [outputs[name].outputs[0].token_ids for name in "ab"] == expected
    nothing_left(llm)


def test_what_was_prepared_for_an_aborted_request_is_let_go_of_at_once(llava):
    llm = open_llm(llava)
    engine = llm.llm_engine
    with held_back(llm) as gate:
        engine.add_request("running", one(A), greedy())
        engine.abort_request("running")
        gate.set()
        wait_until_idle(llm)
    engine.add_request("ready", one(B), greedy())
    wait_until_idle(llm)
    assert engine.media.preprocessor.pixel_bytes > 0
    engine.abort_request("ready")
    assert engine.media.preprocessor.pixel_bytes == 0 and not engine.has_unfinished_requests()
    assert engine.step() == []
    nothing_left(llm)


def test_aborted_while_it_waits(llava):
    llm = open_llm(llava, max_num_seqs=1)
    engine, expected = llm.llm_engine, alone(llava, one(B))
    engine.add_request("first", one(A), greedy(40))
    for name, image in (("second", C), ("third", B)):
        engine.add_request(name, one(image), greedy())
    all_ready(engine)
    engine.step()
    assert len(engine.scheduler.waiting) == 2
    engine.abort_request("second")
    outputs = drive(engine)
    assert set(outputs) == {"first", "third"} and outputs["third"].outputs[0].token_ids == expected[0]
    nothing_left(llm)


def test_aborted_half_way_through_an_image(path, kind):
    llm = open_llm(path, max_num_batched_tokens=4)
    engine, expected = llm.llm_engine, alone(path, one(A, before=[5]))
    engine.add_request("a", one(A, before=[5]), greedy())
    until(engine, lambda: "a" in engine.core.requests and engine.core.requests["a"].sequences[0].num_computed)
    (sequence,) = engine.core.requests["a"].sequences
    assert 1 < sequence.num_computed < engine.core.requests["a"].media[0].item.end and len(sequence.held) == 1
    engine.abort_request("a")
    assert not sequence.held and sequence.finish_reason == "abort"
    nothing_left(llm)
    calls = count_encodes(llm)
    assert tokens(llm, one(A, before=[5])) == expected and not calls


def test_an_aborted_call_of_generate_leaves_nothing(llava, monkeypatch):
    llm = open_llm(llava)
    engine = llm.llm_engine
    step = engine.step
    for count in (1, 4):
        left = iter(range(count))
        monkeypatch.setattr(engine, "step", lambda left=left: step() if next(left, None) is not None else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(llm, [one(A), prompt([5, 6]), one(B)])
        monkeypatch.setattr(engine, "step", step)
        wait_until_idle(llm)
        nothing_left(llm)


def test_a_prompt_that_is_refused_leaves_nothing_of_those_beside_it(llava):
    llm = open_llm(llava)
    with pytest.raises(RequestError, match="0 image markers and 1 image"):
        ask(llm, [one(A), one(B), prompt([5], [A])])
    wait_until_idle(llm)
    nothing_left(llm)


def test_workers_end_with_their_engine(llava):
    def workers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("quire-images")}

    before, llm = workers(), LLM(llava, skip_tokenizer_init=True, num_gpu_blocks_override=50)
    assert tokens(llm, one(A), one(B))
    new = workers() - before
    assert new
    del llm
    gc.collect()
    for thread in new:
        thread.join(10)
    assert not any(thread.is_alive() for thread in new)


# What must not depend on when images are ready


def test_draws_without_a_seed_do_not_depend_on_which_image_is_ready_first(llava):
    params, answers = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True), []
    for slow in ((), (A,), (B,)):
        llm = open_llm(llava, seed=4)
        engine = llm.llm_engine
        with held_back(llm, lambda source, slow=slow: source in slow) as gate:
            for name, given in (("a", one(A)), ("b", one(B)), ("c", prompt([5]))):
                engine.add_request(name, given, params)
            outputs = until(engine, lambda: len(engine.media.waiting) <= len(slow))  # noqa: B023
            gate.set()
        outputs |= drive(engine)  # a request may have ended while an image was prepared
        answers.append([outputs[name].outputs[0].token_ids for name in "abc"])
    assert answers[0] == answers[1] == answers[2]


def test_the_older_request_goes_first_even_if_its_image_is_ready_later(llava):
    llm = open_llm(llava, max_num_seqs=1)
    engine = llm.llm_engine
    with held_back(llm, lambda source: source is A) as gate:
        engine.add_request("a", one(A), greedy())
        engine.add_request("text", prompt([5, 6]), greedy(60))
        engine.add_request("b", one(B), greedy())
        until(engine, lambda: "b" in engine.core.requests)
        gate.set()
        all_ready(engine)
    assert [sequence.request.request_id for sequence in engine.scheduler.waiting] == ["a", "b"]
    drive(engine)
    nothing_left(llm)


# Scores, and a placeholder outside the vocabulary


def test_prompt_scores_around_images_are_those_of_generation(path, kind):
    """The model says the same of a token whether it generates it or is given it."""
    given = prompt([5, IMAGE, 6, 7, IMAGE, 8], [A, B])
    wanted = open_llm(path, max_num_batched_tokens=7)
    output = ask(wanted, given, greedy(12, logprobs=2, logit_bias={IMAGE: -100}))[0]
    answer = list(output.outputs[0].token_ids)
    placed = {**given, "prompt_token_ids": [*output.prompt_token_ids, *answer]}
    scored = ask(wanted, placed, greedy(1, prompt_logprobs=2))[0]
    assert scored.prompt_logprobs[-12:] == output.outputs[0].logprobs
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    again = ask(open_llm(path), placed, greedy(1, prompt_logprobs=2))[0]
    assert again.prompt_logprobs == scored.prompt_logprobs
    nothing_left(wanted)


@pytest.fixture(scope="module")
def outside(llava, tmp_path_factory) -> LLM:
    """A model whose placeholder has no embedding and no logit."""
    path = tmp_path_factory.mktemp("outside")
    shutil.copytree(llava, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "image_token_index": 400}))
    return open_llm(str(path))


def test_a_placeholder_outside_the_vocabulary(outside, llava):
    given = prompt([5, 400, 6], [A])
    assert tokens(outside, given, prompt([5, 6])) == alone(llava, prompt([5, IMAGE, 6], [A]), prompt([5, 6]))
    assert ask(outside, given, greedy(repetition_penalty=1.3))[0].outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="token 1 is 401"):
        ask(outside, prompt([5, 401, 6], [A]))
    nothing_left(outside)


def test_parameters_that_cannot_be_are_refused_before_images_are_looked_at(llava):
    llm = open_llm(llava)
    with pytest.raises(RequestError, match="bad_words"):
        llm.llm_engine.add_request("bad", one(A), SamplingParams(bad_words=[" "]))
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_fault_in_making_one_request_loses_no_other(llava, monkeypatch):
    llm = open_llm(llava)
    engine, made = llm.llm_engine, llm.llm_engine.input_processor.request

    def faulty(prepared, *rest):
        if prepared.request_id == "bad":
            raise KeyError("a fault of ours")
        return made(prepared, *rest)

    monkeypatch.setattr(engine.input_processor, "request", faulty)
    for name in ("bad", "good"):
        engine.add_request(name, one(A), greedy())
    outputs = drive(engine)
    assert "a fault of ours" in outputs["bad"].outputs[0].stop_reason
    assert [outputs["good"].outputs[0].token_ids] == alone(llava, one(A))
    nothing_left(llm)


def test_images_beyond_the_model_s_length_are_refused_before_all_are_processed(llava, monkeypatch):
    llm = open_llm(llava, max_model_len=40)
    processor = llm.llm_engine.media.preprocessor.processor
    seen, call = [], type(processor).__call__
    monkeypatch.setattr(type(processor), "__call__", lambda self, *args: seen.append(1) or call(self, *args))
    many = prompt([IMAGE] * 20, [picture(number, (24, 24)) for number in range(20)])
    assert re.search(r"image 4: .* 45 tokens .* room for 40", error_of(ask(llm, many)[0]))
    assert len(seen) == 4
    nothing_left(llm)
