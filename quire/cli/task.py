"""What `quire run` is asked, told from its words. What is wrong with them is said before anything heavy is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire.checkpoint import smollm2
from quire.cli.prompts import stdin_text
from quire.errors import QuireError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w./-]+)?")


@dataclass(frozen=True)
class Task:
    """What the arguments ask for.

    model None: the bundled one. prompt None: none yet, ask for it. images: paths of files, or URLs. adapters: whom to
    ask, by folder or name; none: the model itself.
    """

    model: str | None
    prompt: str | None
    chat: bool
    raw: bool
    images: Sequence[str] = ()
    adapters: Sequence[str] = ()

    @classmethod
    def from_words(
        cls,
        words: list[str],
        chat: bool | None,
        raw: bool,
        images: Sequence[str] = (),
        adapters: Sequence[str] = (),
    ) -> Task:
        """Tell the model from the prompt by the number of words; read stdin where that is the prompt."""
        if chat and len(adapters) > 1:
            raise QuireError("--chat takes one --lora: a conversation is with one of them (/lora changes that).")
        if len(words) > 2:
            raise QuireError(f"{len(words)} arguments: quote the prompt, as in quire run MODEL 'a prompt'.")
        if chat:
            model, prompt = [*words, None, None][:2]
            return cls(model, stdin_text(raw) if prompt == "-" else prompt, True, raw, images, adapters)
        model, prompt = [None, None, *words][-2:]
        if len(words) == 1:
            _check_prompt(words[0])
        if prompt is None and chat is None and not raw and sys.stdin.isatty():
            return cls(model, None, True, raw, images, adapters)
        return cls(model, stdin_text(raw) if prompt in (None, "-") else prompt, False, raw, images, adapters)


def _check_prompt(word: str) -> None:
    """One word is the prompt, and not a model that was left without one."""
    way_out = "add a prompt, or '-' to read it from stdin, or --chat"
    # os.path's answer is no, where Path's may be an OSError: a long prompt is no name of a file
    is_file = word.endswith(".gguf") and os.path.isfile(word)
    if word == smollm2.NAME or is_file or (word and os.path.isfile(os.path.join(word, "config.json"))):
        raise QuireError(f"{word} is a model: {way_out}.")
    if _HUB_ID.fullmatch(word):
        raise QuireError(f"{word} looks like a model's name: {way_out}. (As a prompt: echo {word} | quire run)")
