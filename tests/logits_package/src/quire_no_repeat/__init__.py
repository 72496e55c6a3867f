"""Generate no run of n tokens twice, as Hugging Face's `no_repeat_ngram_size` has it."""

import math

from quire import LogitsProcessor


class NoRepeat(LogitsProcessor):
    """extra_args: {"no_repeat_ngram_size": n}. Runs of the prompt count too."""

    arguments = ("no_repeat_ngram_size",)

    def __init__(self, request):
        self.size = request.extra_args["no_repeat_ngram_size"]
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"no_repeat_ngram_size={self.size!r} is refused: it is a whole number from 1 on")
        self.vocab_size = request.vocab_size
        self.tokens = []
        self.followers = {}  # the n - 1 tokens before -> those that have followed them
        self.advance(request.prompt_ids)

    def advance(self, token_ids):
        for token in token_ids:
            if token < self.vocab_size:  # a placeholder of an image may have no logit
                self.followers.setdefault(self.last(), []).append(token)
            self.tokens.append(token)

    def apply(self, logits, output_ids):
        logits[self.followers.get(self.last(), [])] = -math.inf

    def last(self):
        """The last n - 1 tokens."""
        return tuple(self.tokens[max(0, len(self.tokens) - self.size + 1) :])
