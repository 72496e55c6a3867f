"""What the scheduler hands the runner and gets back: plain data, so that the runner may live elsewhere.

The scheduler never touches a tensor, and the runner keeps nothing of a request between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.lora import AdapterMix
from quire.platform.sampling.results import Sampled, TopLogprobs
from quire.platform.sampling.sampling_input import SamplingState
from quire.types import PlaceholderRange

if TYPE_CHECKING:
    import torch


# In a chunk's tokens: the one that the step before draws for its sequence. The runner has it.
PENDING_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample from the logits behind a chunk's last token. The fields are the sampler's."""

    state: SamplingState
    seed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's tokens to compute in this step."""

    sequence_id: int
    token_ids: Sequence[int]
    start: int  # position of the first of them
    block_ids: Sequence[int]  # the sequence's blocks, enough for all its tokens up to the chunk's end
    prompt_len: int
    draws: Sequence[Draw]  # empty while the sequence has more tokens to compute; several when it will fork
    score: PromptScore | None  # what to report about the prompt's own tokens
    media: Sequence[PlaceholderRange] = ()  # the images whose placeholders are among the tokens, whole or in part
    rotary: np.ndarray | None = None  # [3, tokens] int64 in models with `mrope`; None: their positions
    adapters: AdapterMix = ()  # (uid, weight) of each adapter that the tokens run with; empty: the base model


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Prompt logprobs: rows `first`.. of the chunk foretell `targets`; report `count` alternatives of each."""

    first: int
    targets: Sequence[int]
    count: int


@dataclass(frozen=True, slots=True)
class EncodeImage:
    """An image whose features some chunk of this step, or a later one, needs."""

    digest: bytes
    length: int  # so many features it must have
    inputs: Mapping[str, torch.Tensor]
    adapters: AdapterMix = ()  # that change what works on images


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: Sequence[Chunk]
    copies: Sequence[tuple[int, int]]  # (from, to) blocks to copy before the chunks
    poison: Sequence[int] = ()  # debug runs: freed blocks to overwrite with NaN, then
    encode: Sequence[EncodeImage] = ()  # before the chunks
    release: Sequence[bytes] = ()  # digests whose features to let go of, before the encoding
    drop: Sequence[int] = ()  # uids of adapters to take off the device, before anything else
    install: Sequence[int] = ()  # and those to put there, then
    # (block of the pool, block in main memory) to copy before any other block is touched: what the former hold, their
    # sequences lose. Then (block in main memory, block of the pool), which may be the same ones.
    swap_out: Sequence[tuple[int, int]] = ()
    swap_in: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Both lists stand beside the plan's chunks: a token for each draw, and the scores asked for."""

    sampled: Sequence[Sequence[Sampled]]
    scores: Sequence[Sequence[TopLogprobs]]
