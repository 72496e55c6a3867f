"""An engine's tokenizer as llguidance needs it: which bytes each token stands for, and which tokens end an answer.

Making one takes up to a second for a large vocabulary, and none of it is needed for answers without a shape: the first
request that wants one has it made, where no step waits for it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from quire.errors import RequestError

_WAY_OUT = "ask without structured_outputs, or serve the model with a tokenizer that has a tokenizer.json"


@dataclass(frozen=True)
class VocabularySource:
    """What a vocabulary is made of: plain data, that travels to a worker's process once.

    tokenizer: the `tokenizers` library's JSON. size: the number of logits. eos_ids: the tokens that end an answer,
    first the one that is taken where an answer can only end. forbidden: tokens that are never generated in a shape:
    those without a text, and placeholders of images.
    """

    tokenizer: str
    size: int
    eos_ids: tuple[int, ...]
    forbidden: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """The same for the same contents."""
        rest = json.dumps([self.size, self.eos_ids, self.forbidden])
        return hashlib.sha256(rest.encode() + b"\0" + self.tokenizer.encode()).digest()


def vocabulary_source(
    tokenizer: Any, size: int, eos_ids: frozenset[int], never: Sequence[int] = ()
) -> VocabularySource:
    """What can be sent to who makes a vocabulary.

    tokenizer: transformers'. size: the number of logits. never: tokens that are not to be generated in a shape.
    Raises RequestError for a tokenizer that does not say which bytes its tokens stand for.
    """
    if tokenizer is None:
        raise RequestError("structured_outputs need a tokenizer, and none is loaded: load one.")
    if not eos_ids:
        raise RequestError(
            "structured_outputs: no end token of this model is known, so an answer could not end where its shape does; "
            "name eos_token_id in generation_config.json, or by hf_overrides."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        kind = type(tokenizer).__name__
        raise RequestError(f"structured_outputs: {kind} does not tell the bytes of its tokens; {_WAY_OUT}.")
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    named = set(backend.get_vocab(with_added_tokens=True).values())
    own = getattr(tokenizer, "eos_token_id", None)
    first = [own] if own in eos_ids else []
    return VocabularySource(
        tokenizer=_within(backend.to_str(), size, max(named, default=0)),
        size=size,
        eos_ids=(*first, *sorted(eos_ids.difference(first))),
        forbidden=tuple(sorted({*(one for one in range(size) if one not in named), *(n for n in never if n < size)})),
    )


def _within(tokenizer: str, size: int, last: int) -> str:
    """The tokenizer's JSON without added tokens that the model has no logits for (markers of videos, say)."""
    if last < size:
        return tokenizer
    found = json.loads(tokenizer)
    found["added_tokens"] = [token for token in found.get("added_tokens", []) if token["id"] < size]
    return json.dumps(found)


class Vocabulary:
    """One engine's tokens.

    tokenizer: llguidance's. words: 32-bit words of a mask. allowed: [words] int32, the tokens that may be generated in
    a shape at all.

    Raises RequestError for a tokenizer that llguidance cannot read.
    """

    def __init__(self, source: VocabularySource) -> None:
        self.source = source
        self.size = source.size
        self.eos_ids = source.eos_ids
        try:
            self.tokenizer = LLTokenizer(source.tokenizer, n_vocab=source.size, eos_token=list(source.eos_ids))
        except Exception as error:  # llguidance's, for tokenizers of other kinds, and for ids beyond `size`
            raise RequestError(f"structured_outputs: the tokenizer cannot be read ({error}); {_WAY_OUT}.") from error
        self._forbidden = frozenset(source.forbidden) | self._markers()
        self.words = -(-source.size // 32)
        self.allowed = self.bits(range(source.size)) & ~self.bits(sorted(self._forbidden))

    def _markers(self) -> frozenset[int]:
        """The token of the byte 0xFF, which byte-level vocabularies have, and which is in no text.

        llguidance marks special tokens by that byte, and takes the token for one of them, whose text is empty.
        """
        special, decode = self.tokenizer.is_special_token, self.tokenizer.decode_bytes
        return frozenset(one for one in range(self.size) if special(one) and not decode([one]))

    def bits(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Tokens as a mask [words] int32."""
        bits = np.zeros(self.words * 32, np.uint8)
        bits[np.fromiter(token_ids, np.int64, len(token_ids))] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def special_tokens(self) -> Mapping[str, int]:
        """The text of each special token -> its id."""
        return self._special

    @cached_property
    def _special(self) -> Mapping[str, int]:
        tokenizer = self.tokenizer
        special = (one for one in range(self.size) if one not in self._forbidden and tokenizer.is_special_token(one))
        return {tokenizer.decode_bytes([one]).decode(errors="replace"): one for one in special}

    def are_allowed(self, token_ids: Sequence[int]) -> bool:
        """Whether these may be generated in a shape."""
        return self._forbidden.isdisjoint(token_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for; a special one for its text."""
        return self.pieces[token_id] if token_id < self.size else b""

    @cached_property
    def pieces(self) -> list[bytes]:
        """`bytes_of` all tokens."""
        decode = self.tokenizer.decode_bytes
        return [b"" if one in self._forbidden else decode([one]) for one in range(self.size)]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((piece, one) for one, piece in enumerate(self.pieces) if piece)

    def beginning_with(self, text: bytes) -> Iterator[int]:
        """The tokens that begin with a text and are longer."""
        place = bisect_left(self._sorted, (text + b"\0", -1)) if text else 0
        for piece, one in self._sorted[place:]:
            if not piece.startswith(text):
                return
            yield one

    def containing(self, text: bytes) -> list[int]:
        """The tokens that have a text in them and go on behind it."""
        return [one for one, piece in enumerate(self.pieces) if text in piece and not piece.endswith(text)]
