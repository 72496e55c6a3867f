"""The tokenizer: a plain one of its file alone, others through transformers; and what the engine asks of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.checkpoint import strict_json
from quire.checkpoint.config_numbers import check_token_ids
from quire.errors import CheckpointError, RequestError
from quire.platform.inputs.plain_tokenizer import read_plain_tokenizer
from quire.platform.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_TOKENS

logger = logging.getLogger("quire")

# At least one of these is in a directory that has a tokenizer. Without the check, transformers may make an
# empty tokenizer of config.json alone, and the first request would find out.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_ANY_ID = 2**31


def load_tokenizer(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a directory or a Hub repository, at `revision`: transformers', or a `PlainTokenizer`.

    Raises CheckpointError when there is none, or when it needs code from the repository and that is not
    trusted.
    """
    way_out = (
        "name another one with tokenizer=..., or give prompts as token ids and load none with skip_tokenizer_init=True"
    )
    # os.path's answer is no, where Path's may be an OSError: a name that is too long is no directory
    if os.path.isdir(path) and not any(os.path.isfile(Path(path) / name) for name in _TOKENIZER_FILES):
        raise CheckpointError(f"{path}: no tokenizer here (none of {', '.join(_TOKENIZER_FILES)}); {way_out}.")
    tokenizer: Any = None
    if os.path.isdir(path) and revision is None and not trust_remote_code:
        tokenizer = read_plain_tokenizer(Path(path))
    try:
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)
        tokenizer.encode("a")  # settings of a wrong type are found here, not by the first request
    except Exception as error:  # transformers raises nearly everything, from OSError to AttributeError
        raise CheckpointError(f"{path}: its tokenizer cannot be loaded ({error}); {way_out}.") from error
    if getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = _processor_template(Path(path))
    if not len(tokenizer):
        raise CheckpointError(f"{path}: its tokenizer has no tokens, a file is missing; {way_out}.")
    return tokenizer


def _processor_template(path: Path) -> str | None:
    """The template in chat_template.json, where processors of older vision-language models keep theirs."""
    file = path / "chat_template.json"
    template = _read_object(file).get("chat_template") if file.is_file() else None
    return template if isinstance(template, str) else None


def processor_settings(path: Path) -> dict[str, Any]:
    """A checkpoint's processor_config.json, but for the parts of it that are the image processor's and the like.

    Raises CheckpointError for a file that is no JSON.
    """
    file = path / "processor_config.json"
    found = _read_object(file) if file.is_file() else {}
    return {name: value for name, value in found.items() if not isinstance(value, dict)}


def eos_token_ids(
    path: str | Path,
    tokenizer: Any = None,
    vocab_size: int = _ANY_ID,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> frozenset[int]:
    """The tokens that end a sequence: generation_config.json's (else config.json's) and the tokenizer's own.

    overrides: of config.json's fields; they outweigh both files. One that is not in the model's vocabulary can never be
    drawn: it is left out, and the log says so (a GPT-2 of another vocabulary has 50256, as its class's default). Raises
    CheckpointError for a file that is no JSON, and for an id that is no number.
    """
    found: set[int] = set()
    for name in ("hf_overrides", "generation_config.json", "config.json"):
        file = Path(path) / name
        config = overrides if name == "hf_overrides" else _read_object(file) if file.is_file() else {}
        check_token_ids(config, file)
        text = config.get("text_config")
        ids = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise CheckpointError(f"{file}: eos_token_id is {ids!r}; it is a token id or a list of them.")
        found.update(ids)
        break
    own = getattr(tokenizer, "eos_token_id", None)
    found |= {own} if isinstance(own, int) else set()
    drawn = frozenset(one for one in found if one < vocab_size)
    if found - drawn:
        none = "" if drawn else "; no other is known, so answers end at max_tokens or at a stop that is asked for"
        logger.warning(
            "%s: eos_token_id has %s, and the vocabulary ends at %d: they can never be drawn, and are left out%s",
            path, sorted(found - drawn), vocab_size - 1, none,
        )  # fmt: skip
    return drawn


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = strict_json.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not an object.")
    return content


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a prompt's text, with the special tokens (BOS) that the tokenizer puts around a text.

    Raises RequestError for a text that is no valid Unicode (lone surrogates).
    """
    return _encode(tokenizer, text, add_special_tokens=True)


def learn_words(tokenizer: Any, words: Iterable[str]) -> None:
    """Give each of these words a token of its own, where it has none."""
    missing = [word for word in words if token_id_of(tokenizer, word) is None]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)


def encode_rendered(
    tokenizer: Any, pieces: Sequence[str], typed: str | Sequence[str] = (), add_special_tokens: bool = False
) -> list[int]:
    """The same for a rendered chat template, which has written the special tokens itself: none are added.

    pieces: the text, cut wherever a user typed the text of a special token. typed: which one, or which at each cut.
    There, it stays text. add_special_tokens: they are written all the same, around the first piece.

    Raises RequestError for a tokenizer that makes the token of it nonetheless.
    """
    ids = _encode(tokenizer, pieces[0], add_special_tokens)
    if len(pieces) == 1:
        return ids
    words = [typed] * (len(pieces) - 1) if isinstance(typed, str) else list(typed)
    plain = {word: _plain_ids(tokenizer, word) for word in dict.fromkeys(words)}
    following = _continued(lambda text: _encode(tokenizer, text, add_special_tokens=False), pieces[1:])
    for word, piece_ids in zip(words, following, strict=True):
        ids += plain[word] + piece_ids
    return ids


def _plain_ids(tokenizer: Any, typed: str) -> list[int]:
    """The text of a special token as text. Raises RequestError where the tokenizer cannot write it so."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = [] if backend is None else next(_continued(lambda text: _encode_plain(backend, text), [typed]))
    if not ids or token_id_of(tokenizer, typed) in ids:
        raise RequestError(f"the tokenizer cannot write {typed!r} but as its special token: take it out of the text.")
    return ids


def _continued(encode: Callable[[str], list[int]], texts: Sequence[str]) -> Iterator[list[int]]:
    """The token ids of texts, each of which goes on after another.

    Tokenizers like Llama's put a space before what they take for a beginning. After a line's end they put none.
    """
    line = encode("\n")
    for text in texts:
        whole = encode("\n" + text) if text else line
        yield whole[len(line) :] if whole[: len(line)] == line else encode(text)


def _encode_plain(backend: Any, text: str) -> list[int]:
    """The token ids of a text in which no added token is looked for, by the `tokenizers` object of a tokenizer.

    Not by split_special_tokens=True, which sets a switch of the tokenizer under the feet of other threads, and
    leaves added tokens that are not special.
    """
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


def token_id_of(tokenizer: Any, token: str) -> int | None:
    """The id of a token; None where the tokenizer does not know it."""
    found = tokenizer.convert_tokens_to_ids(token)  # an unknown one may get the id of the unknown token
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token else None


def _encode(tokenizer: Any, text: str, add_special_tokens: bool, what: str = "the prompt") -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid Unicode: character {error.start} is a lone surrogate; take it out."
        ) from error
    # verbose=False: whether the prompt is too long is the engine's to say
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as token ids, as at the start of a text and, where it differs, after a space.

    Raises RequestError for a word without tokens or with too many, for too many together, and for words without a
    tokenizer.
    """
    if words and tokenizer is None:
        raise RequestError("bad_words are texts, and no tokenizer is loaded: use logit_bias, or load one.")
    encoded: dict[tuple[int, ...], None] = {}
    count = 0
    for place, word in enumerate(words):
        what = f"bad_words[{place}]"
        alone = tuple(_encode(tokenizer, word.lstrip(), False, what))
        if not alone:
            raise RequestError(f"bad_words: {word!r} has no tokens; take it out.")
        if len(alone) > MAX_BAD_WORD_TOKENS:
            raise RequestError(f"{what} has {len(alone)} tokens, and the limit is {MAX_BAD_WORD_TOKENS}: shorten it.")
        spaced = tuple(_encode(tokenizer, " " + word.lstrip(), False, what))
        encoded[alone] = None
        # More tokens mean that the space stands for itself: forbidding the word as such suffices.
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            encoded[spaced] = None
        count += len(alone) + len(spaced)
        if count > MAX_BAD_WORDS_TOKENS:
            raise RequestError(
                f"bad_words has more than {MAX_BAD_WORDS_TOKENS} tokens in all: give fewer or shorter ones."
            )
    return tuple(encoded)
