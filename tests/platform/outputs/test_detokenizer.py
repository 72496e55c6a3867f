"""The detokenizer: text as `decode` gives it, in whole characters, and ended by stop strings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quire import SamplingParams
from quire.platform.outputs.detokenizer import Detokenizer, _byte_characters, decode_token, token_bytes

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox runs away from the dog.",
    "naïve café, Straße, größer, 你好世界, 日本語のテキスト, привет мир, 👩‍👩‍👧 family, 🇩🇪 flag",
]
SPECIAL = ["<s>", "</s>"]


def wrap(tokenizer: Tokenizer) -> Any:
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@cache
def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def byte_fallback(strip: bool = True) -> Any:
    """As Llama's: spaces shown as U+2581 (one put before the text), unknown characters as bytes."""
    words = sorted({piece for text in CORPUS for piece in text[:97].replace(" ", " \u2581").split(" ")})
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    letters = sorted(set("".join(words)) | {"\u2581"})
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, "<unk>", *bytes_, *letters])}
    merges: list[tuple[str, str]] = []
    for pair in (("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "\u2581"), ("o", "x")):
        vocabulary["".join(pair)] = len(vocabulary)
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("\u2581")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer)


def metaspace(prepend_scheme: str = "always") -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


def word_piece() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrap(tokenizer)


MAKERS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "byte_fallback": cache(byte_fallback),
    "byte_fallback_without_strip": cache(lambda: byte_fallback(strip=False)),
    "metaspace": cache(metaspace),
    "metaspace_never": cache(lambda: metaspace("never")),
    "word_piece": cache(word_piece),
}
WITH_BYTES = ["byte_level", "byte_fallback", "byte_fallback_without_strip"]

CLUSTERS = [
    "👩‍👩‍👧",
    "👍🏽",
    "🇩🇪",
    "e\u0301",
    "\u200d",
    "\ufe0f",
    "你",
    "привет",
    "\ufffd",
    " the",
    "  ",
    "\n",
]
UNICODE = st.lists(
    st.one_of(
        st.sampled_from(CLUSTERS),
        st.sampled_from("thedogfx .,!?"),
        st.characters(codec="utf-8", max_codepoint=0x2FF),
        st.characters(codec="utf-8", min_codepoint=0x1F300, max_codepoint=0x1FAFF),
    ),
    max_size=30,
).map("".join)


def stream(tokenizer: Any, ids: Iterable[int], prompt: Iterable[int] = (), **kwargs: Any) -> tuple[str, list[str]]:
    """The whole text, and the pieces in which it became safe to hand out."""
    detokenizer = Detokenizer(tokenizer, list(prompt), SamplingParams(**kwargs))
    pieces, sent = [], 0
    for token_id in ids:
        if detokenizer.append(token_id) is not None:
            break
        safe = detokenizer.emittable(False)
        pieces.append(safe[sent:])
        sent = len(safe)
    detokenizer.finish()
    pieces.append(detokenizer.emittable(True)[sent:])
    return detokenizer.text, pieces


def decode(tokenizer: Any, ids: Iterable[int], skip: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(text=UNICODE)
def test_text_is_what_decode_gives(name: str, text: str) -> None:
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, pieces = stream(tokenizer, ids)
    assert whole == "".join(pieces) == decode(tokenizer, ids)


@pytest.mark.parametrize("name", WITH_BYTES)
@settings(max_examples=150, deadline=None)
@given(text=UNICODE)
def test_never_half_a_character(name: str, text: str) -> None:
    text = text.replace("\ufffd", "")
    _, pieces = stream(MAKERS[name](), MAKERS[name]().encode(text, add_special_tokens=False))
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_output_continues_the_prompt(name: str, data: st.DataObject) -> None:
    """Prompt text and output text together are the decoding of all ids, wherever they part."""
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode(data.draw(UNICODE), add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    before, after = ids[:cut], ids[cut:]
    prompt_text = decode(tokenizer, before)
    if not prompt_text or prompt_text.endswith("\ufffd"):
        return
    assert prompt_text + stream(tokenizer, after, prompt=before)[0] == decode(tokenizer, ids)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "metaspace_never"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(0, 40))
def test_any_ids_at_all_decode_the_same(name: str, skip: bool, seed: int, length: int) -> None:
    """Broken UTF-8, special and added tokens in the middle, ids beyond the vocabulary."""
    tokenizer = MAKERS[name]()
    ids = [random.Random(seed + n).randrange(len(tokenizer) + 2) for n in range(length)]
    whole, pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert whole == "".join(pieces) == decode(tokenizer, ids, skip)


@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback_without_strip", "word_piece"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(0, 40), skip=st.booleans())
def test_handed_out_text_is_never_taken_back(name: str, seed: int, length: int, skip: bool) -> None:
    tokenizer = MAKERS[name]()
    ids = [random.Random(seed + n).randrange(len(tokenizer) + 2) for n in range(length)]
    whole, pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert whole == "".join(pieces)


def fallback_bytes(data: bytes) -> list[int]:
    return [MAKERS["byte_fallback"]().convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


@pytest.mark.parametrize("data", [b"\xe2", b"\xe2\x82", b"\xe2\x28", b"\xff\xe2\x82\xac", b"\xf0\x9f\x91"])
def test_broken_bytes_show_as_decode_shows_them(data: bytes) -> None:
    tokenizer = MAKERS["byte_fallback"]()
    letter = tokenizer.convert_tokens_to_ids("x")
    for ids in (
        fallback_bytes(data),
        [*fallback_bytes(data), letter],
        [letter, *fallback_bytes(data), letter],
    ):
        assert stream(tokenizer, ids)[0] == decode(tokenizer, ids)


def test_the_stated_exception_for_broken_runs() -> None:
    tokenizer = MAKERS["byte_fallback"]()
    ids = fallback_bytes("€".encode() + b"\xff")
    assert (stream(tokenizer, ids)[0], decode(tokenizer, ids)) == ("€\ufffd", "\ufffd" * 4)


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    ids = fallback_bytes("…€".encode())
    assert stream(MAKERS["byte_fallback"](), ids[4:], prompt=ids[:4])[0] == "€"
    ids = byte_level().encode("🇩🇪", add_special_tokens=False)
    for cut in range(len(ids)):
        head, tail = byte_level().decode(ids[:cut]), stream(byte_level(), ids[cut:], prompt=ids[:cut])[0]
        assert head.rstrip("\ufffd") + tail == "🇩🇪"


def test_the_prompts_half_character_is_not_the_outputs() -> None:
    """What the output does not complete is shown without the prompt's bytes: as the output alone decodes."""
    euro, thumb, word = "€".encode(), "👍".encode(), b"a"
    cases = (
        (euro[:1], word, "a"),
        (euro[:2], euro, "€"),
        (thumb[:1], thumb[1:3] + word, "\ufffd" * 2 + "a"),
        (euro[:2], b"", ""),
        (euro[:1], euro[1:2], "\ufffd"),
        (euro[:2], euro[2:] + word, "€a"),
        ("\ufffd".encode()[:2], "\ufffd".encode()[2:] + word, "\ufffda"),
    )
    character = {byte: letter for letter, byte in _byte_characters().items()}
    level, letter = byte_level().convert_tokens_to_ids, MAKERS["byte_fallback"]().convert_tokens_to_ids("a")
    for prompt, output, expected in cases:
        for name in ("byte_level", "byte_fallback"):
            ids = [level(character[byte]) for byte in prompt + output]
            if name == "byte_fallback":
                raw = fallback_bytes(prompt + output)
                ids = [letter if byte == ord("a") else raw[n] for n, byte in enumerate(prompt + output)]
            text = stream(MAKERS[name](), ids[len(prompt) :], prompt=ids[: len(prompt)])[0]
            assert text == expected, (name, prompt, output)


def test_the_leading_space_after_a_prompt() -> None:
    tokenizer = MAKERS["byte_fallback"]()
    the = tokenizer.encode("the", add_special_tokens=False)
    bos = tokenizer.bos_token_id
    assert decode(tokenizer, the) == "the"
    assert stream(tokenizer, the, prompt=[])[0] == "the"
    assert stream(tokenizer, the, prompt=[bos])[0] == "the"
    assert stream(tokenizer, the, prompt=[bos, *the])[0] == " the"
    assert stream(tokenizer, the, prompt=[*the, *[bos] * 20])[0] == " the"
    assert stream(tokenizer, the, prompt=[bos], skip_special_tokens=False)[0] == " the"


@pytest.mark.parametrize("name", MAKERS)
def test_special_tokens_are_skipped_or_shown(name: str) -> None:
    tokenizer = MAKERS[name]()
    ids = [*tokenizer.encode("the dog", add_special_tokens=False), tokenizer.eos_token_id]
    ids += [tokenizer.convert_tokens_to_ids("<tool>"), *tokenizer.encode("fox", add_special_tokens=False)]
    for skip in (True, False):
        text = stream(tokenizer, ids, skip_special_tokens=skip)[0]
        assert text == decode(tokenizer, ids, skip)
        assert ("</s>" in text) is not skip and "<tool>" in text


def test_spaces_between_special_tokens() -> None:
    tokenizer = MAKERS["word_piece"]()
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, *tokenizer.encode("dog", add_special_tokens=False)]
    shown = stream(tokenizer, ids, skip_special_tokens=False)[0]
    tight = stream(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)[0]
    assert (shown, tight) == ("<s> </s> dog", "<s></s> dog")


@pytest.mark.parametrize("name", MAKERS)
def test_forks_go_their_own_way(name: str) -> None:
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode("the 👍🏽 dog fox", add_special_tokens=False)
    for cut in range(len(ids)):
        first = Detokenizer(tokenizer, [], SamplingParams(stop="zzz"))
        for token_id in ids[:cut]:
            first.append(token_id)
        second = first.fork()
        for token_id in tokenizer.encode("zz quick", add_special_tokens=False):
            second.append(token_id)
        second.finish()
        for token_id in ids[cut:]:
            first.append(token_id)
        first.finish()
        assert first.text == decode(tokenizer, ids)


def test_decode_token_shows_the_token_itself() -> None:
    tokenizer = MAKERS["byte_fallback"]()
    assert decode_token(tokenizer, tokenizer.convert_tokens_to_ids("\u2581the")) == " the"
    assert decode_token(tokenizer, fallback_bytes(b"\n")[0]) == "\n"
    assert decode_token(tokenizer, fallback_bytes(b"\xe2")[0]) == "\ufffd"
    assert decode_token(tokenizer, tokenizer.eos_token_id) == "</s>"
    assert decode_token(tokenizer, len(tokenizer) + 5) == ""
    assert decode_token(byte_level(), byte_level().encode(" dog", add_special_tokens=False)[0]).startswith(" ")
    assert decode_token(MAKERS["word_piece"](), MAKERS["word_piece"]().convert_tokens_to_ids("dog")) == "dog"


@pytest.mark.parametrize("name", ["byte_fallback", "byte_level"])
def test_the_bytes_of_tokens_are_their_own(name: str) -> None:
    """A letter's parts are none by themselves, and are the letter together."""
    tokenizer = MAKERS[name]()
    text = "\u0416 \u6c34\u706b \U0001f469"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [token_bytes(tokenizer, token) for token in ids]
    assert b"".join(parts).strip() == text.encode()
    assert any("\ufffd" in part.decode(errors="replace") for part in parts)
    assert [part.decode(errors="replace") for part in parts] == [decode_token(tokenizer, token) for token in ids]
    assert token_bytes(tokenizer, tokenizer.eos_token_id) == tokenizer.eos_token.encode()
    assert token_bytes(tokenizer, len(tokenizer) + 5) == b""


def test_the_bytes_of_a_word_are_its_text_s() -> None:
    tokenizer = MAKERS["word_piece"]()
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("dog")) == b"dog"


def test_detokenize_false_does_nothing() -> None:
    detokenizer = Detokenizer(object(), [1, 2], SamplingParams(detokenize=False))
    assert detokenizer.append(3) is None
    detokenizer.finish()
    assert detokenizer.text == detokenizer.emittable(True) == ""
    assert Detokenizer(None, [], SamplingParams()).append(1) is None


def test_cost_of_a_token_does_not_grow() -> None:
    stops = [f"stop{n}" for n in range(8)]
    detokenizer = Detokenizer(byte_level(), [], SamplingParams(stop=stops, max_tokens=None))
    ids = byte_level().encode("The quick brown fox 👍🏽 ", add_special_tokens=False) * 100

    def seconds() -> float:
        begun = time.process_time()
        for token_id in ids:
            detokenizer.append(token_id)
        return time.process_time() - begun

    first = min(seconds() for _ in range(3))
    for _ in range(20):
        seconds()
    assert min(seconds() for _ in range(3)) < 5 * first + 0.01
