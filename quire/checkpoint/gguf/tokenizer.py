"""A GGUF file's tokenizer and chat template, as the files that transformers reads of any checkpoint.

Two kinds: "gpt2", byte-level BPE with merges, whose words `words` cuts; and "llama", SentencePiece's BPE
(arXiv:1808.06226), which joins the pair that makes the token with the highest score. The latter becomes merges in the
order of scores. transformers' own converters (`integrations/gguf`) know few families, and cut words otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.special import KEY, is_set, token_id
from quire.checkpoint.gguf.words import WORDS, splitter
from quire.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
_SPACE = "▁"
_MOST_CHARACTERS = 512  # of a token that others are joined to: SentencePiece's have 16, and runs of spaces a few more
_MOST_CUTS = 1 << 23  # of all tokens together
_KEY = KEY
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_WAY_OUT = "name the model's own with tokenizer=..., or give prompts as token ids with skip_tokenizer_init=True"
# Control tokens that end a turn or a text, whichever model's they are: files name one of them.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>", "<EOT>", "[EOT]", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "</s>",
    "<|eos|>", "[|endofturn|]", "<eos>",
})  # fmt: skip


def has_tokenizer(file: GgufFile) -> bool:
    """Whether there is one at all."""
    kind = file.metadata.get(f"{_KEY}model", "none")
    return not isinstance(kind, str) or kind not in ("none", "no_vocab")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write its files. Raises CheckpointError for one that cannot be made exactly."""
    kind = file.metadata[f"{_KEY}model"]
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.name}: its tokenizer is of the kind {repr(kind)[:60]}; gpt2 and llama are read; {_WAY_OUT}."
        )
    suppressed = file.metadata.get(f"{_KEY}suppress_tokens")
    if suppressed is not None and (not isinstance(suppressed, np.ndarray) or suppressed.size):
        raise CheckpointError(f"{file.name}: {_KEY}suppress_tokens, tokens that are never drawn, are not served.")
    vocabulary = _Vocabulary(file)
    tokenizer = _byte_level(file, vocabulary) if kind == "gpt2" else _sentence_piece(file, vocabulary)
    tokenizer.add_tokens(vocabulary.added(rstrip=kind == "llama" and file.architecture == "phi3"))
    begins = kind == "llama" or WORDS[file.metadata[f"{_KEY}pre"]].begins
    _add_ends(file, tokenizer, vocabulary, begins)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[one] for key, name in _NAMES.items()
           if (one := vocabulary.special(key)) is not None},
    }  # fmt: skip
    template = _template(file)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def ends_of(file: GgufFile) -> list[int]:
    """Tokens that end an answer: those that the file names, and those that are known to end turns."""
    metadata = file.metadata
    named = [token_id(file, key) for key in ("eos", "eot", "eom")]
    tokens, types = metadata.get(f"{_KEY}tokens"), metadata.get(f"{_KEY}token_type")
    if isinstance(tokens, list) and types is not None and len(types) == len(tokens):
        controls = np.flatnonzero(np.asarray(types) == _CONTROL).tolist()
        named += [one for one in controls if tokens[one] in _ENDS]
    return list(dict.fromkeys(one for one in named if one is not None))


class _Vocabulary:
    """Tokens in the order of their ids, each text once, and their types."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        tokens = file.metadata.get(f"{_KEY}tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(one, str) for one in tokens):
            raise CheckpointError(f"{file.name}: {_KEY}tokens must be a list of texts; {_WAY_OUT}.")
        table = file.tensors.get("token_embd.weight")
        if table is not None and len(tokens) > table.shape[0]:
            raise CheckpointError(
                f"{file.name}: {_KEY}tokens has {len(tokens):,}, and of embeddings there are {table.shape[0]:,}; "
                f"{_WAY_OUT}."
            )
        self.types = self.numbers("token_type", len(tokens))
        self.tokens = [one or f"[EMPTY_{place}]" for place, one in enumerate(tokens)]
        self.ids: dict[str, int] = {}
        for place, one in enumerate(self.tokens):
            if self.ids.setdefault(one, place) != place:
                raise CheckpointError(
                    f"{file.name}: the tokens {self.ids[one]} and {place} are both {one[:40]!r}; {_WAY_OUT}."
                )

    def numbers(self, key: str, count: int) -> np.ndarray:
        """An array of the tokenizer's. Raises CheckpointError for one that is missing or of another length."""
        found = self._file.metadata.get(_KEY + key)
        if not isinstance(found, np.ndarray) or len(found) < count or found.dtype == np.bool_:
            raise CheckpointError(f"{self._file.name}: {_KEY}{key} must be {count:,} numbers; {_WAY_OUT}.")
        if not np.isfinite(found[:count]).all():
            raise CheckpointError(f"{self._file.name}: {_KEY}{key} has numbers that are not finite; {_WAY_OUT}.")
        return found[:count]

    def special(self, key: str) -> int | None:
        found = token_id(self._file, key)
        if found is None and key in ("bos", "eos", "unknown") and self._file.metadata[f"{_KEY}model"] == "llama":
            found = {"unknown": 0, "bos": 1, "eos": 2}[key]  # SentencePiece's own
        return found if found is not None and found < len(self.tokens) else None

    def added(self, rstrip: bool) -> list[Any]:
        """Tokens that are found in texts before all else. rstrip: control tokens take the spaces behind them."""
        from tokenizers import AddedToken

        takes_no_space = ("<unk>", "<s>", "<|endoftext|>")
        return [
            AddedToken(
                token,
                special=bool(kind in (_CONTROL, _UNKNOWN)),
                normalized=False,
                rstrip=bool(rstrip and kind == _CONTROL and token not in takes_no_space),
            )
            for token, kind in zip(self.tokens, self.types.tolist(), strict=True)
            if kind in (_CONTROL, _USER, _UNKNOWN)
        ]


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name, merges = file.metadata.get(f"{_KEY}pre"), file.metadata.get(f"{_KEY}merges")
    if not isinstance(name, str) or name not in WORDS:
        raise CheckpointError(
            f"{file.name}: {_KEY}pre is {name!r}, which says how texts are cut into words; known are "
            f"{', '.join(sorted(WORDS))}; {_WAY_OUT}."
        )
    if not isinstance(merges, list) or not all(isinstance(one, str) for one in merges):
        raise CheckpointError(f"{file.name}: {_KEY}merges must be a list of texts; {_WAY_OUT}.")
    pairs = [_pair(file, one) for one in merges]
    known = [
        one for one in pairs if one[0] in vocabulary.ids and one[1] in vocabulary.ids and "".join(one) in vocabulary.ids
    ]
    words = WORDS[name]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, known, ignore_merges=words.ignores_merges))
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter(words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    """A merge's two sides. A space stands between them, and one may be at the very beginning."""
    place = merge.find(" ", 1)
    if place < 0:
        raise CheckpointError(f"{file.name}: {_KEY}merges has {merge[:40]!r}, which is no pair; {_WAY_OUT}.")
    return merge[:place], merge[place + 1 :]


def _sentence_piece(file: GgufFile, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    prefix = is_set(file, "add_space_prefix", True)
    unknown = vocabulary.special("unknown")
    merges = _merges(file, vocabulary, vocabulary.numbers("scores", len(vocabulary.tokens)))
    token = None if unknown is None else vocabulary.tokens[unknown]
    bytes_too = bool((vocabulary.types == _BYTE).any())
    model = models.BPE(vocabulary.ids, merges, unk_token=token, fuse_unk=True, byte_fallback=bytes_too)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(file: GgufFile, vocabulary: _Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    """All pairs of tokens that make one, in the order of its score; of one token's, as their ids are."""
    ids = vocabulary.ids
    plain = np.isin(vocabulary.types, (_CONTROL, _UNKNOWN, _BYTE), invert=True).tolist()
    lengths = [len(token) for token, own in zip(vocabulary.tokens, plain, strict=True) if own]
    if max(lengths, default=0) > _MOST_CHARACTERS or sum(lengths) > _MOST_CUTS:
        raise CheckpointError(
            f"{file.name}: {_KEY}tokens has one of {max(lengths):,} characters, and {sum(lengths):,} in all: up to "
            f"{_MOST_CHARACTERS:,} and {_MOST_CUTS:,} are cut into pairs; {_WAY_OUT}."
        )
    ranks = (-np.asarray(scores, np.float64)).tolist()
    found: list[tuple[float, int, int, int]] = []
    for place, token in enumerate(vocabulary.tokens):
        if not plain[place]:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None and plain[left] and plain[right]:
                found.append((ranks[place], place, left, right))
    found.sort(key=lambda one: (one[0], one[1], one[2], one[3]))
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in found]


def _add_ends(file: GgufFile, tokenizer: Any, vocabulary: _Vocabulary, begins: bool) -> None:
    """BOS before a text and EOS behind it, where the file asks for them."""
    from tokenizers import processors

    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    before = bos if is_set(file, "add_bos_token", begins) else None
    behind = eos if is_set(file, "add_eos_token", False) else None
    around = [(vocabulary.tokens[one], one) for one in (before, behind) if one is not None]
    if not around:
        return
    first = [] if before is None else [vocabulary.tokens[before]]
    last = [] if behind is None else [vocabulary.tokens[behind]]

    def side(name: str) -> list[str]:
        return [*first, name, *last]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=side("$A"), pair=[*side("$A:0"), *(f"{one}:1" for one in side("$B"))], special_tokens=around
    )


def _template(file: GgufFile) -> str | list[dict[str, str]] | None:
    """The chat template; where there are others beside the first, all of them by their names."""
    first, start = file.metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(start): one for key, one in file.metadata.items() if key.startswith(start)}
    if not all(isinstance(one, str) for one in (first or "", *named.values())):
        raise CheckpointError(f"{file.name}: tokenizer.chat_template must be a text; {_WAY_OUT}.")
    if not isinstance(first, str) or not first:
        return None
    if not named:
        return first
    return [{"name": name, "template": one} for name, one in {"default": first, **named}.items()]
