"""A tokenizer of single bytes, an end, and a special token; and what a grammar takes of texts."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

END, SPECIAL = 256, 257


class Bytes:
    """One token a byte."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<tool>")
    special_token_ids = (END, SPECIAL)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def special_tokens(self) -> dict[str, int]:
        """As a vocabulary has it."""
        return {"<tool>": SPECIAL}


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar takes a text, and it may end there. <tool> is the special token."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for place, piece in enumerate(text.split("<tool>")):
        tokens += [*([SPECIAL] if place else []), *piece.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
