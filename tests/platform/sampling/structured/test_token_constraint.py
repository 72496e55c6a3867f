"""The processor by itself: every mask against brute force, going back, forking, triggers, what is certain."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

from quire import RequestError, SamplingParams
from quire.platform.sampling.logits_processors.base import LogitsProcessor, ProcessorError
from quire.platform.sampling.structured.compilation import compile_constraint
from quire.platform.sampling.structured.compiler import ConstraintCompiler
from quire.platform.sampling.structured.constraint import CompiledConstraint, Trigger
from quire.platform.sampling.structured.params import ReasoningTexts
from quire.platform.sampling.structured.params import StructuredOutputsParams as Shape
from quire.platform.sampling.structured.processor import TokenConstraint
from quire.platform.sampling.structured.template import Template
from quire.platform.sampling.structured.vocabulary import Vocabulary, vocabulary_source
from tests.platform.conftest import save_tokenizer

SIZE = 384  # logits: more than the tokenizer has tokens
END = 2
WORDS = ["the red circle", "the red square", "la", "la la", "star", "stare", "a\u00e9\u4e2d"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, SIZE, frozenset([END]), never=[300])


def processor(compiler: ConstraintCompiler, stop_ids: frozenset[int] = frozenset([END]), **shape) -> LogitsProcessor:
    (made,) = compiler.processors(SamplingParams(structured_outputs=Shape(**shape)), stop_ids)
    return made.fork()


def allowed(one: LogitsProcessor, output: list[int] = ()) -> set[int]:
    if one.idle:
        return set(range(SIZE))
    return set(np.flatnonzero(np.isfinite(one.changed(np.zeros(SIZE, np.float32), output))).tolist())


def pieces(tokenizer) -> dict[int, bytes]:
    """The bytes of each token that is no special one, by the alphabet of byte-level BPE."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in alphabet]
    of = {chr(byte): byte for byte in alphabet} | {chr(256 + place): byte for place, byte in enumerate(others)}
    return {
        token: bytes(of[letter] for letter in text)
        for text, token in tokenizer.get_vocab().items()
        if token not in tokenizer.all_special_ids
    }


def test_masks_of_choices_are_those_of_brute_force(compiler, tokenizer) -> None:
    texts, known = [word.encode() for word in WORDS], pieces(tokenizer)
    never = 300
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        one, text, output = processor(compiler, choice=WORDS), b"", []
        while True:
            expected = {
                token
                for token, piece in known.items()
                if token != never and any(choice.startswith(text + piece) for choice in texts)
            }
            if text in texts:
                expected.add(END)
            found = allowed(one, output)
            # Where the next bytes are certain, of the tokens that spell them only the tokenizer's own is allowed.
            certain = one.fork()
            assert found == expected or (len(found) == 1 and found < expected), text
            token = rng.choice(sorted(found))
            output.append(token)
            one.advance([token])
            if token == END:
                break
            text += known[token]
            assert allowed(certain) == found  # a fork is not touched by what becomes of the other
        seen.add(text.decode())
    assert seen == set(WORDS)


@pytest.mark.parametrize("pattern", [r"(ab|a)*c?", r"[0-9]{1,4}(\.[0-9]+)?", r"x{2,5}|y+"])
def test_masks_of_regexes_lead_to_matches_only(compiler, tokenizer, pattern: str) -> None:
    known, rng = pieces(tokenizer), random.Random(2)
    for _ in range(25):
        one, text = processor(compiler, regex=pattern), ""
        for _ in range(12):
            found = allowed(one)
            assert found and all(token == END or token in known for token in found)
            assert (END in found) == bool(re.fullmatch(pattern, text))
            token = rng.choice(sorted(found))
            one.advance([token])
            if token == END:
                assert re.fullmatch(pattern, text)
                break
            text += known[token].decode()


def test_going_back_is_as_if_it_had_not_gone_on(compiler) -> None:
    rng = random.Random(3)
    one = processor(compiler, json={"type": "array", "items": {"type": "integer"}})
    masks, output = [allowed(one)], []
    for _ in range(20):
        token = rng.choice(sorted(masks[-1] - {END}))
        output.append(token)
        one.advance([token])
        masks.append(allowed(one))
        if masks[-1] == {END}:
            break
    for back in (1, 3, 2):
        assert one.rollback(back)
        del masks[len(masks) - back :], output[len(output) - back :]
        assert allowed(one) == masks[-1]
    again = processor(compiler, json={"type": "array", "items": {"type": "integer"}})
    again.advance(output)
    assert allowed(again) == masks[-1]
    assert not one.rollback(len(output) + 1)  # it never had so many


def test_certain_tokens_spell_what_must_come(compiler, tokenizer) -> None:
    one = processor(compiler, regex=r'\{"name":"star"\}')
    (first,) = allowed(one)
    following = one.follow([first], [])
    assert following is not None and following.ends and following.tokens[-1] == END
    assert tokenizer.decode([first, *following.tokens[:-1]]) == '{"name":"star"}'
    assert allowed(one) == {first}  # it has not gone on
    choice = processor(compiler, choice=["ab", "abcdef"])
    choice.advance(tokenizer.encode("a", add_special_tokens=False))
    assert choice.follow(tokenizer.encode("b", add_special_tokens=False), []) is None  # it may end here


def test_a_sequence_that_may_end_ends_by_its_own_tokens(compiler, tokenizer) -> None:
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    stop = 7
    one = processor(compiler, frozenset([END, stop]), regex="a+")
    assert allowed(one) >= {a} and END not in allowed(one) and stop not in allowed(one)
    one.advance([a])
    assert {END, stop} <= allowed(one)
    ignoring = processor(compiler, frozenset(), regex="a{1,2}")  # ignore_eos
    ignoring.advance([a])
    assert END not in allowed(ignoring)
    ignoring.advance([a])
    assert allowed(ignoring) == {END}
    following = ignoring.follow([END], [])
    assert following is not None and following.ends


def triggered(tokenizer, text: str, grammar: str, **more) -> LogitsProcessor:
    source = vocabulary_source(tokenizer, SIZE, frozenset([END]))
    constraint = CompiledConstraint(triggers=(Trigger(text, LLMatcher.grammar_from_lark(grammar)),), **more)
    return TokenConstraint(Template(constraint, Vocabulary(source)), frozenset([END]))


def test_free_text_is_free_until_a_trigger(tokenizer) -> None:
    one = triggered(tokenizer, "<f>", 'start: ("1" | "2") "</f>"')
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    for token in encode("la la: the red < f "):
        assert one.idle and one.follow([token], []) is None
        one.advance([token])
    one.advance(encode("<f"))
    (close,) = encode(">")
    forked = one.fork()
    one.advance([close])
    assert not one.idle
    assert {tokenizer.decode([token]) for token in allowed(one)} == {"1", "2"}
    (digit,) = encode("2")
    following = one.follow([digit], [])
    assert following is not None and not following.ends
    assert tokenizer.decode(following.tokens) == "</f>"
    one.advance([digit, *following.tokens])
    assert one.idle and forked.idle
    one.advance(encode(" and again <f>"))
    assert not one.idle  # a second one


def test_a_token_that_runs_past_a_trigger_runs_on_as_it_must(tokenizer) -> None:
    """Of those that end a trigger and go on, the tokens that what follows does not allow are forbidden."""
    token, text = next(
        (token, piece.decode()) for token, piece in pieces(tokenizer).items() if len(piece) > 3 and piece.isalpha()
    )
    for begun, trigger in ((0, text[:2]), (1, "~" + text[:1])):
        for rest, fits in ((text[2 - begun :], True), ("zz", False)):
            one = triggered(tokenizer, trigger, f'start: "{rest}" "!"')
            one.advance(tokenizer.encode("~", add_special_tokens=False) * begun)
            assert (token in allowed(one)) == fits
            if fits:
                one.advance([token])
                assert {tokenizer.decode([one]) for one in allowed(one)} == {"!"}


def test_the_answer_may_end_with_its_first_tag(tokenizer) -> None:
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    one = triggered(tokenizer, "<f>", 'start: "1"', stop_after_first=True)
    one.advance(encode("la <f>"))
    following = one.follow(encode("1"), [])
    assert following is not None and following.ends and following.tokens == (END,)
    lazy = triggered(tokenizer, "<f>", "start: /[0-9]+/")
    lazy.advance(encode("la <f>"))
    assert {tokenizer.decode([token]) for token in allowed(lazy)} <= set("0123456789")
    lazy.advance(encode("1"))
    assert len(allowed(lazy)) == SIZE  # a number that may be complete: it goes on, or the text does
    lazy.advance(encode("2la <f>"))
    assert {tokenizer.decode([token]) for token in allowed(lazy)} <= set("0123456789")


def test_what_comes_after_reasoning(compiler, tokenizer) -> None:
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    one = processor(compiler, choice=["la"], after="</think>")
    for token in encode("the red circle {}"):
        assert one.idle
        one.advance([token])
    one.advance(encode("</think>"))
    following = one.follow(encode("la")[:1], [])
    assert allowed(one) == set(encode("la")[:1]) and following is not None and following.ends


@pytest.mark.parametrize("before", ["", " "])
def test_a_trigger_counts_in_no_reasoning_that_the_answer_opens(tokenizer, before: str) -> None:
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    make = lambda: triggered(tokenizer, "<f>", 'start: "1"', after="</t>", opens="<t>")  # noqa: E731
    thinks = make()
    for token in encode(before + "<t> the <f> red <f>"):
        assert thinks.idle and thinks.follow([token], []) is None
        thinks.advance([token])
    assert thinks.idle
    thinks.advance(encode("</t> la <t>"))
    assert thinks.idle
    thinks.advance(encode("<f>"))
    assert {tokenizer.decode([token]) for token in allowed(thinks)} == {"1"}
    for free in ("", "la <t> la", "<th", "<"):
        plain = make()
        for token in encode(before + free + "<f"):
            plain.advance([token])
        following = plain.follow(encode(">"), [])
        assert following is not None and following.tokens[:1] == tuple(encode("1"))
        plain.advance(encode(">"))
        assert {tokenizer.decode([token]) for token in allowed(plain)} == {"1"}
    with pytest.raises(RequestError, match="opens: it goes with after"):
        compile_constraint(Shape(regex="a", after="</t>", opens="<t>"), Vocabulary(make()._known.vocabulary.source))


def test_the_budget_of_thinking(compiler, tokenizer) -> None:
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    end = tuple(encode("</think>"))

    def budget(tokens: int, begun: bool) -> LogitsProcessor:
        params = SamplingParams(
            thinking_token_budget=tokens, reasoning=ReasoningTexts(("<think>",), ("</think>",), begun)
        )
        (made,) = compiler.processors(params, frozenset([END]))
        return made.fork()

    spent = budget(3, begun=True)
    spent.advance(encode("a")[:1] * 2)
    following = spent.follow(encode("b"), [])
    assert following is not None and following.tokens == end
    none = budget(0, begun=True)
    assert allowed(none) == {end[0]}
    none.advance(end)
    assert none.idle and none.follow(encode("a"), []) is None
    opened = budget(1, begun=False)
    opened.advance(encode(" <think>"))
    following = opened.follow(encode("a"), [])
    assert following is not None and following.tokens == end
    without = budget(0, begun=False)
    without.advance(encode("the answer <think>"))
    assert without.idle and without.follow(encode("a"), []) is None
    early = budget(9, begun=True)
    early.advance([*encode("a"), *end, *encode("la la la la la la la la la la la la")])
    assert early.idle and early.follow(encode("a"), []) is None


def test_it_travels_as_data(compiler) -> None:
    made = compiler.processors(SamplingParams(structured_outputs=Shape(choice=WORDS)), frozenset([END]))[0]
    data = pickle.dumps(made)
    assert len(data) < 2000  # the vocabulary does not travel
    assert allowed(pickle.loads(data).fork()) == allowed(made.fork())


def test_what_no_grammar_allows_ends_its_request_alone(compiler, tokenizer) -> None:
    one = processor(compiler, choice=["ab"])
    with pytest.raises(ProcessorError) as told:
        one.advance([300])
    assert told.value.failure.by_caller and "structured_outputs" in told.value.failure.message


def test_tokenizers_that_cannot_be_read_are_refused(tokenizer) -> None:
    params = SamplingParams(structured_outputs=Shape(choice=["a"]))
    with pytest.raises(RequestError, match="need a tokenizer"):
        ConstraintCompiler(None, SIZE, frozenset([END])).processors(params, frozenset())
    with pytest.raises(RequestError, match="no end token"):
        ConstraintCompiler(tokenizer, SIZE, frozenset()).processors(params, frozenset())
    with pytest.raises(RequestError, match="does not tell the bytes"):
        ConstraintCompiler(object(), SIZE, frozenset([END])).processors(params, frozenset())
    with pytest.raises(RequestError, match="reasoning-parser"):
        ConstraintCompiler(tokenizer, SIZE, frozenset([END])).processors(
            SamplingParams(thinking_token_budget=3), frozenset()
        )
