"""A generator's answer as a classifier: a reranker's "yes" and "no", without the rest of the vocabulary.

hf_overrides (vLLM's names): classifier_from_token, the tokens; method, "from_2_way_softmax": the second one's score
less the first one's, whose sigmoid is the second's share of both; or "no_post_processing": each token's score.
is_original_qwen3_reranker means the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.checkpoint.files import read_json
from quire.errors import CheckpointError, UnsupportedModelError

_METHODS = ("from_2_way_softmax", "no_post_processing")
_MOST_TOKENS = 1024


class TokenHead(NamedTuple):
    """tokens: words of the vocabulary, or their numbers. difference: whether the second less the first is told."""

    tokens: tuple[str | int, ...]
    difference: bool

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the numbers that are told."""
        told = self.tokens[1:] if self.difference else self.tokens
        return tuple(map(str, told))


def token_head(config: Any) -> TokenHead | None:
    """What a configuration asks for, if it does. Raises UnsupportedModelError."""
    tokens = getattr(config, "classifier_from_token", None)
    original = getattr(config, "is_original_qwen3_reranker", None)
    method = getattr(config, "method", None)
    if tokens is None:
        if original:
            raise UnsupportedModelError(
                "is_original_qwen3_reranker: classifier_from_token must name two tokens, such as ['no', 'yes']."
            )
        return None
    if original:
        method = "from_2_way_softmax"
    if method not in _METHODS:
        raise UnsupportedModelError(f"classifier_from_token: method={method!r} must be one of {', '.join(_METHODS)}.")
    difference = method == "from_2_way_softmax"
    known = isinstance(tokens, (list, tuple)) and all(type(one) in (str, int) for one in tokens)
    if not known or not 1 <= len(tokens) <= _MOST_TOKENS or (difference and len(tokens) != 2):
        raise UnsupportedModelError(
            f"classifier_from_token={tokens!r}: must be a list of {'two tokens' if difference else 'tokens'}."
        )
    return TokenHead(tuple(tokens), difference)


def token_ids(tokens: Sequence[str | int], folder: Path, vocab_size: int) -> list[int]:
    """Their numbers. folder: of tokenizer.json. Raises CheckpointError for what is no token."""
    words = [one for one in tokens if isinstance(one, str)]
    known: dict[str, int] = {}
    if words:
        file = folder / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file}: is not there, and classifier_from_token names words: give tokens' numbers.")
        known = _known(read_json(file), words)
    ids = [one if isinstance(one, int) else known.get(one, -1) for one in tokens]
    for token, number in zip(tokens, ids, strict=True):
        if not 0 <= number < vocab_size:
            raise CheckpointError(f"classifier_from_token: {token!r} is no token of this model's.")
    return ids


def _known(raw: dict[str, Any], words: Sequence[str]) -> dict[str, int]:
    """Of a tokenizer.json: BPE's and WordPiece's vocabularies are objects, Unigram's is a list of pairs."""
    model = raw.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        vocabulary = {one[0]: place for place, one in enumerate(vocabulary) if isinstance(one, list) and one}
    found = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for one in raw.get("added_tokens") or ():
        if isinstance(one, dict):
            found[one.get("content")] = one.get("id")
    return {word: found[word] for word in words if type(found.get(word)) is int}
