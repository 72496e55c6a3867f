"""How answers with a shape end, and how their certain tokens go together with all else that a request may ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLParserLimits

from quire import LLM, BeamSearchParams, RequestError, SamplingParams
from quire.platform.outputs.outputs import CompletionOutput
from quire.platform.sampling.params import RequestOutputKind
from quire.platform.sampling.structured import template
from quire.platform.sampling.structured.params import StructuredOutputsParams as Shape
from quire.platform.sampling.structured.processor import TokenConstraint
from tests.platform.sampling.structured.shapes import params, prompts

SENTENCE = "once upon a time a star met a triangle, and they sang"
CERTAIN = Shape(choice=[SENTENCE])
END = 2


def one(llm: LLM, shape: Shape | None = CERTAIN, prompt: Any = "The red", **more: Any) -> CompletionOutput:
    given = {"max_tokens": 100, "temperature": 0.0, "structured_outputs": shape, **more}
    (output,) = llm.generate(prompt, SamplingParams(**given), use_tqdm=False)
    return output.outputs[0]


def steps(llm: LLM) -> int:
    return llm.llm_engine.scheduler._number  # plans so far: nobody else counts them


def test_certain_tokens_take_no_steps_of_their_own(tiny_llm: LLM) -> None:
    before = steps(tiny_llm)
    answer = one(tiny_llm)
    assert answer.text == SENTENCE and answer.finish_reason == "stop" and answer.stop_reason is None
    assert answer.token_ids[-1] == END and len(answer.token_ids) > 10
    assert steps(tiny_llm) - before <= 3


def test_without_them_the_answers_are_the_same(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = range(24)
    given = [prompts(24)[i] for i in indices], [params(i) for i in indices]
    forced = tiny_llm.generate(*given, use_tqdm=False)
    follow = TokenConstraint.follow

    def never(self: TokenConstraint, *given: Any) -> Any:
        following = follow(self, *given)
        return None if following is None or following.tokens else following

    monkeypatch.setattr(TokenConstraint, "follow", never)
    drawn = tiny_llm.generate(*given, use_tqdm=False)
    for a, b in zip(forced, drawn, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.text, x.token_ids, x.finish_reason, x.logprobs) == (
                y.text,
                y.token_ids,
                y.finish_reason,
                y.logprobs,
            )


@pytest.mark.parametrize("most", range(1, 12))
def test_max_tokens_within_certain_ones(tiny_llm: LLM, most: int) -> None:
    whole = one(tiny_llm, logprobs=1)
    cut = one(tiny_llm, logprobs=1, max_tokens=most)
    assert cut.finish_reason == "length" and cut.token_ids == whole.token_ids[:most]
    assert cut.logprobs == whole.logprobs[:most]


def test_max_tokens_that_just_suffice(tiny_llm: LLM) -> None:
    whole = one(tiny_llm)
    for more in ({}, {"ignore_eos": True}):
        assert one(tiny_llm, max_tokens=len(whole.token_ids), **more).finish_reason == "stop"
        short = one(tiny_llm, max_tokens=len(whole.token_ids) - 1, **more)
        assert short.finish_reason == "length" and short.text == SENTENCE


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_within_certain_tokens(tiny_llm: LLM, kind: RequestOutputKind) -> None:
    whole = one(tiny_llm)
    scheduler = tiny_llm.llm_engine.scheduler
    before = scheduler.generated_tokens
    answer = one(tiny_llm, stop=["a star"], logprobs=0, include_stop_str_in_output=kind is RequestOutputKind.DELTA)
    shown = "once upon a time a star" if kind is RequestOutputKind.DELTA else "once upon a time "
    assert answer.text == shown and (answer.finish_reason, answer.stop_reason) == ("stop", "a star")
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)] and len(answer.logprobs) == len(
        answer.token_ids
    )
    decoded = tiny_llm.get_tokenizer().decode(answer.token_ids)
    assert "a star" in decoded and "a star met" not in decoded  # nothing behind the token that reached it
    assert scheduler.generated_tokens - before == len(answer.token_ids)


def test_a_stop_token_within_certain_tokens(tiny_llm: LLM) -> None:
    whole = one(tiny_llm)
    stop = whole.token_ids[5]
    place = whole.token_ids.index(stop)
    answer = one(tiny_llm, stop_token_ids=[stop])
    assert answer.token_ids == whole.token_ids[: place + 1] and answer.stop_reason == stop


def test_min_tokens(tiny_llm: LLM) -> None:
    whole = one(tiny_llm)
    assert one(tiny_llm, min_tokens=len(whole.token_ids) - 1).token_ids == whole.token_ids
    never = one(tiny_llm, min_tokens=len(whole.token_ids))  # the end token is not one of them
    assert never.finish_reason == "error" and "min_tokens" in str(never.stop_reason)
    more = one(tiny_llm, Shape(regex="(la ?)+"), min_tokens=12, max_tokens=40, temperature=1.0, seed=1)
    assert len(more.token_ids) >= 12 and set(more.text) <= set("la ")


def test_ignore_eos_ends_where_the_shape_does(tiny_llm: LLM) -> None:
    answer = one(tiny_llm, ignore_eos=True)
    assert answer.text == SENTENCE and answer.finish_reason == "stop"
    longest = one(tiny_llm, Shape(regex="a{1,9}"), ignore_eos=True)
    assert longest.text == "a" * 9 and longest.finish_reason == "stop"


def test_what_others_forbid_is_not_certain(tiny_llm: LLM) -> None:
    tokenizer = tiny_llm.get_tokenizer()
    (star,) = tokenizer.encode(" star", add_special_tokens=False)[:1]
    for more in ({"bad_words": [","]}, {"logit_bias": {star: -100}}, {"allowed_token_ids": [3, 4]}):
        answer = one(tiny_llm, **more)
        if "logit_bias" in more:
            assert answer.text == SENTENCE
        else:
            assert answer.finish_reason == "error" and "structured_outputs" in str(answer.stop_reason)
    assert one(tiny_llm, Shape(choice=["a", "b"]), bad_words=["a"]).text == "b"


def test_logprobs_are_of_what_the_shape_allows(tiny_llm: LLM) -> None:
    answer = one(tiny_llm, Shape(choice=["a", "b"]), logprobs=5, temperature=1.0, seed=3)
    first, last = answer.logprobs
    assert sum(2.718281828459045**one.logprob for one in first.values()) == pytest.approx(1)
    assert {one.decoded_token for one in first.values()} == {"a", "b"}
    assert [(one.logprob, one.rank) for one in last.values()] == [(0.0, 1)]
    assert answer.cumulative_logprob == pytest.approx(first[answer.token_ids[0]].logprob)


def test_n_and_beams(tiny_llm: LLM) -> None:
    words = ["la", "la la", "star", "the red circle"]
    (output,) = tiny_llm.generate(
        "The", SamplingParams(n=12, temperature=1.5, seed=5, max_tokens=20, structured_outputs=Shape(choice=words))
    )
    assert {one.text for one in output.outputs} <= set(words) and len({one.text for one in output.outputs}) > 1
    search = BeamSearchParams(beam_width=4, max_tokens=20, structured_outputs=Shape(choice=words))
    (found,) = tiny_llm.beam_search(["The"], search)
    ends = [beam.text.removeprefix("The") for beam in found.sequences]
    assert set(ends) <= set(words) and all(beam.finish_reason == "stop" for beam in found.sequences)
    with pytest.raises(RequestError, match="ignore_eos"):
        BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True, structured_outputs=Shape(choice=words))


def test_a_fault_in_a_grammar_ends_its_request_alone(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = TokenConstraint.advance

    def fails(self: TokenConstraint, token_ids: Any) -> None:
        advance(self, [*token_ids, 383] if "bomb" in str(self._constraint.grammar) else token_ids)

    monkeypatch.setattr(TokenConstraint, "advance", fails)
    shapes = [Shape(choice=["la la la"]), Shape(regex="(bomb)+"), None, Shape(json={"type": "boolean"})]
    given = [SamplingParams(max_tokens=9, temperature=0, structured_outputs=shape) for shape in shapes]
    first, bomb, plain, last = tiny_llm.generate(["The"] * 4, given, use_tqdm=False)
    assert first.outputs[0].text == "la la la" and json.loads(last.outputs[0].text) in (True, False)
    assert bomb.outputs[0].finish_reason == "error" and bomb.failure is not None and bomb.failure.by_caller
    assert plain.outputs[0].finish_reason == "length"


def test_a_choice_that_fails_leaves_its_siblings_as_they_are(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(regex="[a-z ]{30}")
    params = SamplingParams(n=6, temperature=1.5, seed=5, max_tokens=40, structured_outputs=shape, stop=["q"])
    (whole,) = tiny_llm.generate("The", params, use_tqdm=False)
    firsts = [one.token_ids[0] for one in whole.outputs]
    bad = next(token for token in firsts if firsts.count(token) < len(firsts))
    advance = TokenConstraint.advance

    def fails(self: TokenConstraint, token_ids: Any) -> None:
        seen = getattr(self, "seen", [])
        self.seen = [*seen, *token_ids]  # type: ignore[attr-defined]
        advance(self, [*token_ids, 383] if self.seen[0] == bad and len(seen) >= 2 else token_ids)

    monkeypatch.setattr(TokenConstraint, "advance", fails)
    (output,) = tiny_llm.generate("The", params, use_tqdm=False)
    assert output.failure is not None and output.failure.by_caller
    ends = [one.finish_reason == "error" for one in output.outputs]
    assert ends == [token == bad for token in firsts] and any(ends) and not all(ends)
    for one, same in zip(output.outputs, whole.outputs, strict=True):
        if one.finish_reason != "error":
            assert (one.token_ids, one.text, one.finish_reason) == (same.token_ids, same.text, same.finish_reason)


def test_a_schema_that_is_refused_as_a_grammar_is_named_by_its_place(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "json_schema", "json_schema": {"const": "far too large"}}
    place = "tools[3].function.parameters"
    given = [[schema], [schema, {**schema, "place": place}]]
    monkeypatch.setattr(template, "_LIMITS", LLParserLimits(max_grammar_size=1))
    for elements, said in zip(given, ("structured_outputs", place), strict=True):
        with pytest.raises(RequestError, match=re.escape(f"{said}: ")):
            one(tiny_llm, Shape(structural_tag={"format": {"type": "or", "elements": elements}}))


def test_without_a_tokenizer_it_is_refused(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), skip_tokenizer_init=True, num_gpu_blocks_override=16)
    with pytest.raises(RequestError, match="need a tokenizer"):
        one(llm, prompt={"prompt_token_ids": [5]})
