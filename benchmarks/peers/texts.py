"""Texts whose tokens are known: words of a vocabulary that the tokenizer splits at spaces."""

from __future__ import annotations

import random

WORDS = 30000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word(number: int) -> str:
    return f"w{number}"


def texts(count: int, shortest: int, longest: int, seed: int = 7) -> list[tuple[str, int]]:
    """Texts of `shortest` .. `longest` tokens, [CLS] and [SEP] among these: (text, tokens)."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        length = draw.randint(shortest, longest)
        made.append((" ".join(word(draw.randrange(WORDS)) for _ in range(length - 2)), length))
    return made
