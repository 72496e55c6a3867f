"""The contract of a logits processor: what it is made from, what it sees, and what it may change.

A processor is one object a sequence. It is made when the request arrives, from the request alone; it learns of each
token that its sequence gets; and it changes its sequence's row of logits, and no other. So a row cannot depend on the
rows beside it. It can be made again from the request and the tokens at any time (after a preemption, in another
process), and must do the same then. docs/logits-processors.md has a complete example.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Failure

Row = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProcessorRequest:
    """What a processor is made from.

    params: the request's; a plug-in finds its arguments in `params.extra_args`. prompt_ids: ids without a logit may be
    among them (placeholders of images). vocab_size: the number of logits. tokenizer: Hugging Face's, or None where none
    is loaded. stop_ids: the tokens that end the sequence. bad_words: tokenized.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    vocab_size: int
    tokenizer: Any = None
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def extra_args(self) -> dict[str, Any]:
        """A copy of `params.extra_args`; empty where there are none."""
        return dict(self.params.extra_args or {})


class ProcessorError(Exception):
    """A processor's fault, or a request's. `failure`: what its request ends with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Following(NamedTuple):
    """What must come behind a token. tokens: one after the other. ends: the answer is complete then, and nothing may
    come behind it; the last of the tokens, or the token itself where there are none, is its end token."""

    tokens: tuple[int, ...]
    ends: bool


class LogitsProcessor:
    """Changes one sequence's logits before a token is drawn from them. To be derived from.

    arguments: the names in `extra_args` that it takes. It is made for requests that give one of them; with none named
    here it is made for every request.
    until: it does nothing from so many generated tokens on; None: it may always do something.
    forbids: it may make logits -inf. Where one of the others does not allow a token, no token is certain.

    It must pickle: requests may be computed in another process.
    """

    arguments: ClassVar[tuple[str, ...]] = ()
    until: int | None = None
    forbids: bool = True

    def __init__(self, request: ProcessorRequest) -> None:
        """For a request that has just arrived, on any thread; no step waits for it.

        Raises ValueError for arguments that cannot be honoured: the request is refused with its text.
        """

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        """Whether a request needs one."""
        return not cls.arguments or any(name in cls.arguments for name in params.extra_args or ())

    def fork(self) -> Self:
        """One in the same state for another sequence. Derived classes that hold much that never changes share it."""
        return copy.deepcopy(self)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The sequence has got these tokens: one a step, or all that it has when it is built again."""

    def rollback(self, count: int) -> bool:
        """The sequence has lost its last `count` tokens. False: it cannot go back, and is made again."""
        return False

    @property
    def idle(self) -> bool:
        """Whether it does nothing to the next row. Asked once it has been told of all tokens; for one that is at work
        in some parts of an answer only."""
        return False

    def follow(self, token_ids: Sequence[int], output_ids: Sequence[int]) -> Following | None:
        """What must come behind a token that was just drawn; None: nothing is certain. It leaves the processor as it
        is: `advance` will be told of the token and of these.

        These are computed in one step, with nothing drawn for them. token_ids: the token, and what another processor
        says must come behind it.
        """
        return None

    @classmethod
    def begin(cls, processors: Sequence[Self]) -> None:
        """Once a step, before the model computes it: all processors of the class whose rows will be changed. They have
        been told of all tokens. For work that goes on beside the model, in a thread of its own; it returns at once."""

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """Change the row [vocab_size] float32 in place. It leaves the processor as it is.

        output_ids: all tokens that were generated so far, not to be changed; `advance` has been told of them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply()")

    def changed(self, logits: Row, output_ids: Sequence[int]) -> Row:
        """A changed copy of the row."""
        changed = logits.copy()
        self.apply(changed, output_ids)
        return changed

    @classmethod
    def prepare(cls, processors: Sequence[Self], outputs: Sequence[Sequence[int]]) -> None:
        """Once a step, before any of its rows is changed: all processors of the class whose rows will be, with what
        their sequences have generated.

        For work that is done for several sequences in less time than for one after another, such as a grammar's masks
        by threads of its own. Each processor keeps what it is to do; the rows themselves are changed one by one, as a
        row of logits fits the cache and many do not.
        """


class BitMask(NamedTuple):
    """Allowed tokens as bits: token t is bit t % 32 of words[t // 32], [ceil(vocab_size / 32)] uint32 or int32."""

    words: NDArray[Any]


class TokenMask(LogitsProcessor):
    """A processor that allows some tokens and forbids the others: a grammar, say. To be derived from."""

    def allowed(self, output_ids: Sequence[int]) -> Sequence[int] | NDArray[Any] | BitMask | None:
        """The tokens that may come next: their ids, or one bool for each token, or bits. None: all."""
        raise NotImplementedError(f"{type(self).__name__} has no allowed()")

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """-inf for every token that is not allowed; the others' logits stay."""
        allowed = self.allowed(output_ids)
        if allowed is None:
            return
        forbidden = np.ones(len(logits), bool)
        if isinstance(allowed, BitMask):
            forbidden = ~_unpacked(allowed, len(logits))
        else:
            forbidden[_chosen(allowed, len(logits))] = False
        logits[forbidden] = -math.inf


def _chosen(allowed: Any, size: int) -> NDArray[Any]:
    """Ids or bools, as an index into a row. Negative ids would count from its end."""
    chosen = np.asarray(allowed)
    if chosen.dtype == bool:
        if chosen.shape != (size,):
            raise ValueError(f"allowed() gave {chosen.shape} bools, and there are {size} logits")
        return chosen
    if chosen.size and (chosen.dtype.kind not in "iu" or chosen.min() < 0):
        raise ValueError(f"allowed() gave {allowed!s:.80}: these are neither token ids nor bools")
    return chosen.astype(np.int64)


def _unpacked(mask: BitMask, size: int) -> NDArray[np.bool_]:
    words = np.ascontiguousarray(mask.words)
    if words.dtype.itemsize != 4 or words.shape != (-(-size // 32),):
        raise ValueError(f"a BitMask of {size} logits has {-(-size // 32)} words of 32 bits, not {words.shape}")
    bits = np.unpackbits(words.astype("<u4", copy=False).view(np.uint8), bitorder="little", count=size)
    return bits.view(np.bool_)


def ids_within(ids: Any, size: int) -> Ids:
    """As an array, without ids that have no logit (a placeholder in the prompt may lie outside)."""
    array = np.asarray(ids, dtype=np.int64)
    return array[(array >= 0) & (array < size)]
