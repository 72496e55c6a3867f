"""Logits processors of several kinds, good ones and bad ones, as packages would bring them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from quire import BitMask, LogitsProcessor, ProcessorRequest, TokenMask


class Cycle(TokenMask):
    """extra_args: {"cycle": [a, b, ...]}: these tokens one after another, and again."""

    arguments = ("cycle",)

    def __init__(self, request: ProcessorRequest) -> None:
        self.ids = request.extra_args["cycle"]
        if not self.ids or not all(isinstance(one, int) and 0 <= one < request.vocab_size for one in self.ids):
            raise ValueError(f"cycle={self.ids!r} is refused: it is a list of token ids")
        self.place = 0
        self.size = request.vocab_size
        self.how = request.extra_args.get("how", "ids")

    @classmethod
    def applies_to(cls, params: Any) -> bool:
        return "cycle" in (params.extra_args or {})

    def advance(self, token_ids: Sequence[int]) -> None:
        self.place += len(token_ids)

    def allowed(self, output_ids: Sequence[int]) -> Any:
        assert len(output_ids) == self.place
        wanted = self.ids[self.place % len(self.ids)]
        bools = np.arange(self.size) == wanted
        if self.how == "bools":
            return bools
        if self.how == "bits":
            padded = np.zeros(-(-self.size // 32) * 32, bool)
            padded[: self.size] = bools
            return BitMask(np.packbits(padded, bitorder="little").view("<u4"))
        return None if self.how == "all" else [wanted]


Cycle.arguments = ("cycle", "how")


class Even(LogitsProcessor):
    """For every request: even tokens alone, for the first three tokens."""

    def __init__(self, request: ProcessorRequest) -> None:
        self.until = 3

    def fork(self) -> Even:
        return self

    def apply(self, logits: Any, output_ids: Sequence[int]) -> None:
        logits[1::2] = -math.inf


class Together(LogitsProcessor):
    """extra_args: {"together": n}: adds to a logit what `prepare` has worked out for all."""

    arguments = ("together",)
    calls: ClassVar[list[int]] = []

    def __init__(self, request: ProcessorRequest) -> None:
        self.number = request.extra_args["together"]
        self.bias = 0.0

    @classmethod
    def prepare(cls, processors: Sequence[Any], outputs: Sequence[Sequence[int]]) -> None:
        cls.calls.append(len(processors))
        for processor, output_ids in zip(processors, outputs, strict=True):
            if processor.number < 0:
                raise RuntimeError("not this one")
            processor.bias = 100.0 + len(output_ids)

    def apply(self, logits: Any, output_ids: Sequence[int]) -> None:
        assert self.bias == 100.0 + len(output_ids)
        logits[self.number] += self.bias


class Faulty(LogitsProcessor):
    """extra_args: {"faulty": where}: raises, or makes a row that nothing can be drawn from."""

    arguments = ("faulty",)

    def __init__(self, request: ProcessorRequest) -> None:
        self.where = request.extra_args["faulty"]
        self.held: Any = (lambda: None) if self.where == "pickle" else None
        self._fail_at("init")

    def _fail_at(self, where: str) -> None:
        if self.where == where:
            raise RuntimeError(f"broken in {where}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fail_at("unpickle")

    def fork(self) -> Faulty:
        self._fail_at("fork")
        other = object.__new__(Faulty)
        other.__dict__.update(self.__dict__)
        return other

    def advance(self, token_ids: Sequence[int]) -> None:
        self._fail_at("advance")

    def apply(self, logits: Any, output_ids: Sequence[int]) -> None:
        self._fail_at("apply")
        if self.where == "nan":
            logits[3] = math.nan
        if self.where == "infinite":
            logits[3] = math.inf
        if self.where == "nothing":
            logits[:] = -math.inf
        if self.where == "half":
            logits[:100] = 5
            raise RuntimeError("broken in half")


class Leaky(LogitsProcessor):
    """extra_args: {"leaky": 1}: keeps state in the class, so that rows depend on the rows before."""

    arguments = ("leaky",)
    seen = 0

    def apply(self, logits: Any, output_ids: Sequence[int]) -> None:
        type(self).seen += 1
        logits[5] += type(self).seen


class Abstract:
    """No processor at all."""


class NoApply(LogitsProcessor):
    """Does not say what it does."""
