"""What a shape may cost at most: grammars that would hold up steps, fill memory or exhaust a stack."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from llguidance import LLParserLimits

from quire import RequestError
from quire.errors import OverloadedError
from quire.platform.sampling.logits_processors.base import ProcessorError
from quire.platform.sampling.structured import grammar_cache, template
from quire.platform.sampling.structured.compilation import compile_constraint
from quire.platform.sampling.structured.grammar_cache import Compilations, Grammars
from quire.platform.sampling.structured.params import StructuredOutputsParams as Shape
from quire.platform.sampling.structured.processor import TokenConstraint
from quire.platform.sampling.structured.vocabulary import vocabulary_source

END = 2


@pytest.fixture(scope="module")
def grammars(tiny_llm) -> Grammars:
    return Grammars(vocabulary_source(tiny_llm.get_tokenizer(), 384, frozenset([END])))


def test_deep_grammars_do_not_exhaust_the_stack(grammars: Grammars) -> None:
    count = 4000
    rules = [f'r{i}: "a" r{i + 1} | "b" r{i + 1} r{i + 1}' for i in range(count)]
    deep = "\n".join(["start: r0", *rules, f'r{count}: "x"'])
    constraint = Compilations().run(lambda: compile_constraint(Shape(grammar=deep), grammars.vocabulary))
    grammars.prepare(constraint)
    matcher = grammars.template(constraint).matcher(grammars.template(constraint).begins)
    assert not matcher.is_error()


@pytest.mark.parametrize("pattern", ["(a?){2000}a{2000}", "(.*a.{20}|.*b.{19}|.*c.{25})"])
def test_exploding_patterns_are_refused_or_bounded(grammars: Grammars, pattern: str) -> None:
    begun = time.thread_time()
    try:
        constraint = compile_constraint(Shape(regex=pattern), grammars.vocabulary)
        matcher = grammars.template(constraint).matcher(grammars.template(constraint).begins)
        for _ in range(200):
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
            token = next(token for token in range(20, 384) if mask[token // 8] >> token % 8 & 1)
            matcher.consume_token(token)
    except RequestError as error:
        assert "structured_outputs" in str(error)
    assert time.thread_time() - begun < 5


def test_only_so_many_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "_MOST_KEPT", 3)
    made = [compile_constraint(Shape(choice=[f"la {i}"]), grammars.vocabulary) for i in range(5)]
    first = [grammars.template(one) for one in made]
    assert [grammars.template(one) is before for one, before in zip(made[2:], first[2:], strict=True)] == [True] * 3
    assert grammars.template(made[0]) is not first[0]


def steps(one: TokenConstraint, text: bytes) -> None:
    for byte in text:
        assert np.isfinite(one.changed(np.zeros(384, np.float32), [])).any()
        one.advance(one._known.vocabulary.tokenizer.tokenize_bytes(bytes([byte])))


def test_what_earlier_answers_came_by_does_not_end_later_ones(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_LIMITS", LLParserLimits(max_lexer_states=300))
    constraint = compile_constraint(Shape(regex="[a-z]{1,100}[0-9]{1,100}[a-z]{1,300}"), grammars.vocabulary)
    with pytest.raises(ProcessorError):
        steps(TokenConstraint(grammars.template(constraint), frozenset([END])), b"a" * 60 + b"1" * 60 + b"b" * 200)
    steps(TokenConstraint(grammars.template(constraint), frozenset([END])), b"z" * 90 + b"33")


@pytest.mark.parametrize("before", [0, 40])
def test_what_others_come_by_meanwhile_does_not_end_an_answer(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Not in a shape that holds from the start, and not behind a trigger; what is forked and taken back goes along."""
    monkeypatch.setattr(template, "_LIMITS", LLParserLimits(max_lexer_states=300))
    shape = Shape(regex="[a-z]{1,100}[0-9]{1,100}[a-z]{1,300}", after="#" if before else None)
    made = grammars.template(compile_constraint(shape, grammars.vocabulary))
    first, other = (TokenConstraint(made, frozenset([END])) for _ in range(2))
    for one in (first, other):
        steps(one, b"!" * before + b"#" * bool(before))
    steps(first, b"a" * 50)
    with pytest.raises(ProcessorError):
        steps(other, b"b" * 60 + b"1" * 60 + b"b" * 200)
    fork = first.fork()
    steps(fork, b"c" * 40)
    assert fork.rollback(3)
    steps(fork, b"1" * 20)
    assert not np.isfinite(fork.changed(np.zeros(384, np.float32), []))[ord("!") + 3 :].all()
    steps(first, b"d" * 20 + b"2" * 3)


def answer_of(work: Compilations, function: Callable[[], object]) -> list[object]:
    """What a thread of its own is told, once it is."""
    told: list[object] = []

    def ask() -> None:
        try:
            told.append(work.run(function))
        except (RequestError, OverloadedError) as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return told


def test_a_compilation_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "_SECONDS", 1.5)  # within which it begins, behind whatever else there is
    work, stuck = Compilations(), threading.Event()
    (told,) = answer_of(work, stuck.wait)
    assert isinstance(told, RequestError) and "takes over" in str(told)
    monkeypatch.setattr(grammar_cache, "_SECONDS", 60)
    assert answer_of(work, lambda: 5) == [5]  # another thread has taken over
    monkeypatch.setattr(grammar_cache, "_MOST_STUCK", 1)
    (told,) = answer_of(work, lambda: 6)
    assert isinstance(told, OverloadedError) and "too many" in str(told)
    stuck.set()
    deadline = time.monotonic() + 60
    while isinstance(answer_of(work, lambda: 7)[0], OverloadedError):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_waits_behind_a_compilation_that_hangs_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "_SECONDS", 1.5)
    work, stuck, begun = Compilations(), threading.Event(), threading.Event()
    told: list[object] = []
    hanging = threading.Thread(target=lambda: told.extend(answer_of(work, lambda: (begun.set(), stuck.wait()))))
    hanging.start()
    begun.wait()
    monkeypatch.setattr(grammar_cache, "_SECONDS", 60)
    assert answer_of(work, lambda: 5) == [5]
    stuck.set()
    hanging.join()
    assert isinstance(told[0], RequestError)


def test_who_waits_too_long_behind_others_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "_SECONDS", 60)
    work, stuck, begun = Compilations(), threading.Event(), threading.Event()
    slow = threading.Thread(target=lambda: answer_of(work, lambda: (begun.set(), stuck.wait())))
    slow.start()
    begun.wait()
    monkeypatch.setattr(grammar_cache, "_SECONDS", 0.2)
    with pytest.raises(OverloadedError, match="of other requests"):
        work.run(lambda: 5)
    monkeypatch.setattr(grammar_cache, "_SECONDS", 60)
    stuck.set()
    slow.join()
    assert work.run(lambda: 6) == 6


def test_a_compilation_that_ends_as_time_is_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again: none of them may be counted as stuck."""
    monkeypatch.setattr(grammar_cache, "_SECONDS", 0.002)
    work = Compilations()
    for _ in range(60):
        with suppress(RequestError, OverloadedError):
            assert work.run(lambda: time.sleep(0.002)) is None
    monkeypatch.setattr(grammar_cache, "_SECONDS", 60)
    deadline = time.monotonic() + 60
    while work._stuck:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert work.run(lambda: 7) == 7


def test_what_was_prepared_is_there_however_many_come_between(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_cache, "_MOST_KEPT", 2)
    made = [compile_constraint(Shape(choice=[f"lo {i}"]), grammars.vocabulary) for i in range(5)]
    for one in made:
        grammars.prepare(one)
    monkeypatch.setattr(grammars, "template", lambda constraint: pytest.fail("compiled in a step"))
    assert [grammars.prepared(one).constraint for one in made] == made


def test_what_a_compilation_raises_is_its_own_requests(grammars: Grammars) -> None:
    def fails() -> None:
        raise KeyError("a")

    with pytest.raises(KeyError):
        Compilations().run(fails)
