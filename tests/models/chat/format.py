"""A format of chat: a template of our own that writes it, how its checkpoints store one, and what must come out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
Messages = Sequence[Mapping[str, Any]]

TALK: Messages = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < é?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
)
TURNS, ALONE = TALK[1:], TALK[1:2]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"far": {}, "at": {}}}}}


def letters(text: str) -> str:
    """The bytes of a text, each as the letter that stands for it in vocabularies like GPT-2's."""
    return "".join(word for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))


@dataclass(frozen=True)
class Case:
    """text: what `messages` become, "@(%d %b)" being the date so written. options: of `render_chat`."""

    messages: Messages
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def expected(self, now: datetime) -> str:
        return re.sub(r"@\((.+?)\)", lambda form: now.strftime(form[1]), self.text)


@dataclass(frozen=True)
class Refused:
    """says: words of the template's own, by which it refuses `messages`."""

    messages: Messages
    says: str


@dataclass(frozen=True)
class ChatFormat:
    """template: the name of its file; by name, where checkpoints have several. tokens: special ones, in the order of
    the vocabulary. stored: where checkpoints have the template: in tokenizer_config.json as a text ("text") or as a
    list of named ones ("list"), in chat_template.jinja and additional_chat_templates ("files"), in a processor's
    chat_template.json ("processor"), or nowhere (None): then users give it. more: further fields of
    tokenizer_config.json. takes_texts: whether a message's content may be a text.
    """

    template: str | Mapping[str, str]
    tokens: tuple[str, ...]
    cases: tuple[Case, ...]
    bos: str | None = None
    eos: str | None = None
    stored: Literal["text", "list", "files", "processor"] | None = "text"
    refused: tuple[Refused, ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)
    takes_texts: bool = True

    def source(self, name: str = "default") -> str:
        """The template's text."""
        file = self.template if isinstance(self.template, str) else self.template[name]
        return (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")

    def characters(self) -> list[str]:
        """What the tokenizer knows beside the special tokens: the bytes of all that is expected, as letters."""
        text = "".join(case.expected(datetime.now()) for case in self.cases) + "0123456789"
        for token in self.tokens:
            text = text.replace(token, "")
        return sorted(set(letters(text)))

    def vocabulary(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate((*self.tokens, *self.characters()))}

    def ids(self, text: str) -> list[int]:
        """The tokens of a text: special ones where they stand, and one a byte."""
        vocabulary = self.vocabulary()
        special = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        pieces = re.split(f"({special})", text)
        return [vocabulary[one] for piece in pieces for one in ([piece] if piece in self.tokens else letters(piece))]

    def save(self, folder: Path) -> Path:
        """Write a tokenizer that puts BOS before texts, and the template where such checkpoints have it."""
        vocabulary = self.vocabulary()
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(token, normalized=False) for token in self.tokens])
        if self.bos is not None:
            bos = {"id": "BOS", "ids": [vocabulary[self.bos]], "tokens": [self.bos]}
            inner.post_processor = processors.TemplateProcessing(single="BOS $A", special_tokens=[bos])
        given = {"bos_token": self.bos, "eos_token": self.eos, **self.more}
        PreTrainedTokenizerFast(tokenizer_object=inner, **given).save_pretrained(folder)
        self._store(folder)
        return folder

    def _store(self, folder: Path) -> None:
        named = [self.template] if isinstance(self.template, str) else list(self.template)
        if self.stored == "processor":
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": self.source()}))
        elif self.stored == "files":
            (folder / "chat_template.jinja").write_text(self.source(), encoding="utf-8")
            for name in named[1:]:
                (folder / "additional_chat_templates").mkdir(exist_ok=True)
                (folder / "additional_chat_templates" / f"{name}.jinja").write_text(self.source(name))
        elif self.stored is not None:
            several = [{"name": name, "template": self.source(name)} for name in named]
            file = folder / "tokenizer_config.json"
            written = json.loads(file.read_text(encoding="utf-8"))
            written["chat_template"] = self.source() if self.stored == "text" else several
            file.write_text(json.dumps(written), encoding="utf-8")
