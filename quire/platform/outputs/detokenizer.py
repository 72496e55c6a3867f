"""Tokens to text, one at a time: never half a character, and never what a stop string may yet take back.

Three ways, chosen by the tokenizer's decoder:

* byte-level BPE: a token is a run of bytes; text is what of them is complete UTF-8;
* SentencePiece-like (byte fallback, Metaspace): a token is text with U+2581 for a space, or one byte;
* anything else: the tokenizer decodes a short window, and text is what a new token adds to it.

The output continues the prompt: a SentencePiece token keeps its leading space, which `decode(output_ids)`
alone would drop, unless the prompt has no text (only special tokens that are skipped). But for that space,
the text is what `tokenizer.decode(output_ids, clean_up_tokenization_spaces=False)` gives. One exception:
where a run of fallback bytes turns out not to be UTF-8, `decode` takes back the characters that the run
began with; here what has been handed out stays.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from quire.platform.outputs.stop_strings import StopMatcher, StopStrings
from quire.platform.sampling.params import SamplingParams

_BROKEN = "\ufffd"  # shown for what is not UTF-8
_SPACE = "\u2581"  # SentencePiece's visible space
_PRIMING = 8  # tokens of the prompt's end that the decoder sees: more than the bytes of one character
_LONGEST_HOLD = 8  # tokens that a window may keep back: more cannot be one character


class Detokenizer:
    """The text of one sequence. With params.detokenize=False or tokenizer None it stays empty, at no cost.

    stops: params.stop, prepared; they are prepared here where it is not given.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], params: SamplingParams, stops: StopStrings | None = None
    ) -> None:
        self._decoder: _Decoder | None = None
        self._skipped: frozenset[int] = frozenset()
        if tokenizer is not None and params.detokenize:
            vocabulary = _vocabulary(tokenizer)
            self._skipped = vocabulary.special if params.skip_special_tokens else frozenset()
            spaces = params.skip_special_tokens or params.spaces_between_special_tokens
            self._decoder = _DECODERS[vocabulary.kind](tokenizer, vocabulary, spaces)
            self._decoder.prime(self._tail(prompt_ids))
        self._stops = StopMatcher(stops or StopStrings(params.stop)) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._parts: list[str] = []
        self._stop: str | None = None

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped:
                tail.append(int(token_id))
            if len(tail) == _PRIMING:
                break
        return tail[::-1]

    def append(self, token_id: int) -> str | None:
        """Take a generated token; return the stop string that the text has now reached, if any.

        Whatever the tokens, it is the stop string that is complete first, and the longest of those
        complete at the same character. A stop string that is complete before `min_tokens` tokens are
        exceeded does not count.
        """
        if self._decoder is None or self._stop is not None:
            return self._stop
        self._tokens += 1
        if token_id in self._skipped:
            return None
        piece = self._decoder.feed(token_id)
        if not piece:
            return None
        self._parts.append(piece)
        if self._stops is None:
            return None
        match = self._stops.feed(piece, self._tokens > self._min_tokens)
        if match is None:
            return None
        stop, surplus = match
        end = len(self.text) - surplus - (0 if self._include_stop else len(stop))
        self._parts, self._stop = [self.text[:end]], stop
        return stop

    def finish(self) -> None:
        """No more tokens: add what an incomplete character at the end is shown as."""
        if self._decoder is not None and self._stop is None:
            self._parts.append(self._decoder.flush())

    @property
    def text(self) -> str:
        """Everything so far; once a stop string was met, up to it."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def emittable(self, finished: bool) -> str:
        """The text that nothing can take back: without an end that may become a stop string."""
        if finished or self._stops is None or self._stop is not None or self._include_stop:
            return self.text
        return self.text[: len(self.text) - self._stops.held]

    def fork(self) -> Detokenizer:
        """A copy that goes its own way from here."""
        child = copy.copy(self)
        child._parts = [self.text]
        child._decoder = self._decoder.copy() if self._decoder else None
        child._stops = self._stops.copy() if self._stops else None
        return child


def decode_token(tokenizer: Any, token_id: int) -> str:
    """One token's own text, its leading space kept; bytes that are no whole character show as U+FFFD."""
    return _vocabulary(tokenizer).shown(token_id)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that one token stands for, its leading space kept; those of neighbours make letters together.

    Of a tokenizer that tells no bytes (WordPiece, say): those of the token's text.
    """
    return _vocabulary(tokenizer).raw(token_id)


class _Vocabulary:
    """What a tokenizer's tokens stand for; made once for each tokenizer, filled as tokens are met.

    kind: which of the decoders below.  start: what decoding takes from a text's start, see _PieceDecoder.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = weakref.proxy(tokenizer)  # the tokenizer is the key under which this is kept
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._pieces: dict[int, bytes | str | int] = {}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.added = frozenset(added)
        marked = {token_id for token_id, token in added.items() if token.special}
        self.special = frozenset(marked | set(tokenizer.all_special_ids))
        self.kind, self.start, self._has_fallback_bytes = _kind_of(self._backend)

    def piece(self, token_id: int) -> Any:
        """What a token is for kind "bytes": bytes; for "pieces": a str, or an int for a fallback byte."""
        piece = self._pieces.get(token_id)
        if piece is None:
            raw = self._backend.id_to_token(token_id) or ""  # a model may have more logits than tokens
            if self.kind == "bytes":
                piece = _byte_level(raw)
            else:
                byte = _FALLBACK.fullmatch(raw) if self._has_fallback_bytes else None
                piece = int(byte[1], 16) if byte else raw.replace(_SPACE, " ")
            self._pieces[token_id] = piece
        return piece

    def shown(self, token_id: int) -> str:
        return self.raw(token_id).decode(errors="replace")

    def raw(self, token_id: int) -> bytes:
        piece = self.decode([token_id]) if self.kind == "window" else self.piece(token_id)
        if isinstance(piece, str):
            return piece.encode()
        return bytes([piece]) if isinstance(piece, int) else bytes(piece)

    def decode(self, ids: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        known = [i for i in ids if i < len(self._tokenizer)]
        return str(self._tokenizer.decode(known, clean_up_tokenization_spaces=False))


_VOCABULARIES: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    vocabulary = _VOCABULARIES.get(tokenizer)
    if vocabulary is None:
        vocabulary = _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
    return vocabulary


def _kind_of(backend: Any) -> tuple[str, str, bool]:
    """(kind, start, whether tokens like <0x0A> are bytes) of a `tokenizers.Tokenizer`, by its decoder."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return "window", "", False
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return "bytes", "", False
    if types == ["Metaspace"] and steps[0]["replacement"] == _SPACE:
        keeps = steps[0].get("prepend_scheme", "always") == "never"
        return "pieces", "" if keeps else "first token", False
    if types[:3] == ["Replace", "ByteFallback", "Fuse"]:
        replaces = steps[0]["pattern"] == {"String": _SPACE} and steps[0]["content"] == " "
        one_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if replaces and steps[3:] in ([], [one_space]):
            return "pieces", "one space" if steps[3:] else "", True
    return "window", "", False


def _byte_level(raw: str) -> bytes:
    """The bytes of a byte-level token; one with a character that stands for no byte is taken as it is."""
    try:
        return bytes(_BYTE_OF[character] for character in raw)
    except KeyError:
        return raw.encode()


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class _Decoder(Protocol):
    def __init__(self, tokenizer: Any, vocabulary: _Vocabulary, spaces: bool) -> None: ...
    def prime(self, prompt_ids: list[int]) -> None: ...
    def feed(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def copy(self) -> _Decoder: ...


class _ByteDecoder:
    """Tokens are bytes; those of an incomplete character are pending.

    The first `_borrowed` of them are the prompt's: a character that the output does not complete is shown without them.
    """

    def __init__(self, tokenizer: Any, vocabulary: _Vocabulary, spaces: bool) -> None:
        self._piece = vocabulary.piece
        self._pending = b""
        self._borrowed = 0

    def prime(self, prompt_ids: list[int]) -> None:
        for token_id in prompt_ids:
            self.feed(token_id)
        self._borrowed = len(self._pending)

    def feed(self, token_id: int) -> str:
        data = self._pending + self._piece(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        if self._borrowed and text:
            if text[0] == _BROKEN and not data.startswith(_BROKEN.encode()):
                data = data[self._borrowed :]
                text, used = codecs.utf_8_decode(data, "replace", False)
            self._borrowed = 0
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending[self._borrowed :].decode(errors="replace")
        self._pending, self._borrowed = b"", 0
        return text

    def copy(self) -> _ByteDecoder:
        return copy.copy(self)


class _PieceDecoder:
    """Tokens are text or single bytes; a run of bytes is text if it is UTF-8, else U+FFFD for every byte.

    vocabulary.start: "one space" is taken from the text's start, or all spaces of the "first token", or
    nothing.
    """

    def __init__(self, tokenizer: Any, vocabulary: _Vocabulary, spaces: bool) -> None:
        self._piece = vocabulary.piece
        self._start = vocabulary.start
        self._pending = b""
        self._borrowed = 0  # as above
        self._is_broken = False  # the run of bytes has been found not to be UTF-8

    def prime(self, prompt_ids: list[int]) -> None:
        pieces = [self._piece(token_id) for token_id in prompt_ids]
        begun = next((n for n, p in enumerate(pieces) if isinstance(p, str) or p & 0xC0 != 0x80), len(pieces))
        for token_id in prompt_ids[begun:]:  # from where a character begins
            self.feed(token_id)
        self._borrowed = len(self._pending)
        if any(piece != "" for piece in pieces):
            self._start = ""

    def feed(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if piece == "":  # no token of this vocabulary: `decode` does not see it either
            return ""
        text = self._feed_byte(piece) if isinstance(piece, int) else self.flush() + piece
        if self._start == "first token":
            self._start, text = "", text.replace(" ", "")
        elif self._start and text:
            self._start, text = "", text.removeprefix(" ")
        return text

    def _feed_byte(self, byte: int) -> str:
        if self._is_broken:
            return _BROKEN
        self._pending += bytes([byte])
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            if self._borrowed:  # the prompt's character is not completed: without its bytes
                self._pending, self._borrowed = self._pending[self._borrowed : -1], 0
                return self._feed_byte(byte)
            self._is_broken = True
            text = _BROKEN * len(self._pending)
        self._pending, self._borrowed = b"", 0
        return text

    def flush(self) -> str:
        text = _BROKEN * (len(self._pending) - self._borrowed)
        self._pending, self._borrowed, self._is_broken = b"", 0, False
        return text

    def copy(self) -> _PieceDecoder:
        return copy.copy(self)


class _WindowDecoder:
    """Any other tokenizer: it decodes the token before (for its context) and those not yet shown."""

    def __init__(self, tokenizer: Any, vocabulary: _Vocabulary, spaces: bool) -> None:
        self._tokenizer = tokenizer  # kept alive: the vocabulary does not
        self._vocabulary = vocabulary
        self._spaces = spaces
        self._shown: list[int] = []
        self._shown_text = ""
        self._pending: list[int] = []

    def prime(self, prompt_ids: list[int]) -> None:
        self._slide(prompt_ids)

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self._pending) < _LONGEST_HOLD:
            return ""
        if not self._spaces and len(self._pending) == 1:
            both = {token_id, *self._shown[-1:]} <= self._vocabulary.added and self._shown
            text = text.removeprefix(" ") if both else text
        self._slide(self._pending)
        return text

    def _new_text(self) -> str:
        text = self._vocabulary.decode(self._shown + self._pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        return self._vocabulary.decode(self._pending)  # the token before is spelt otherwise now: leave it

    def _slide(self, shown: list[int]) -> None:
        self._shown, self._pending = shown, []
        self._shown_text = self._vocabulary.decode(shown) if shown else ""

    def flush(self) -> str:
        text = self._new_text() if self._pending else ""
        self._slide(self._shown + self._pending)
        return text

    def copy(self) -> _WindowDecoder:
        other = copy.copy(self)
        other._pending = list(self._pending)
        return other


_DECODERS: dict[str, type[_Decoder]] = dict(bytes=_ByteDecoder, pieces=_PieceDecoder, window=_WindowDecoder)
