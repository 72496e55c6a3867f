"""What the engine knows of those who compute: plans go in, tokens come out.

Behind it stands a worker in this process, or one in a process of its own. The engine reaches no model and no tensor
through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quire.lora.adapter import Reader
from quire.models.base import CausalLM
from quire.platform.kv.connector import TransferReport
from quire.platform.scheduling.plan import StepPlan, StepResult
from quire.pooling_types import PoolingSpec

if TYPE_CHECKING:
    from quire.platform.sampling.structured.compiler import RemoteGrammars


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What was found out when a worker was made.

    max_model_len: the model's, or what was asked for. rope_threshold, crosses_threshold: the model's (`CausalLM`).
    num_blocks, num_swap_blocks: of `block_size` tokens, of the KV pool and in main memory; pool_bytes: of the former.
    windows: of the groups of layers that the pool serves, 0 for one that keeps every token. num_states: blocks of the
    pool for layers with states. embedding_size: of one token's embedding. feature_bytes: of one
    placeholder's features. sees: whether the model takes images. kernels: the back end. pooling: what it makes of
    prompts; None: it generates.
    """

    vocab_size: int
    max_model_len: int
    rope_threshold: int | None
    crosses_threshold: bool
    num_blocks: int
    num_swap_blocks: int
    pool_bytes: int
    dtype: torch.dtype
    device: str
    kernels: str
    windows: tuple[int, ...] = (0,)
    num_states: int = 0
    embedding_size: int = 0
    feature_bytes: int = 0
    sees: bool = False
    pooling: PoolingSpec | None = None


class Execution(Protocol):
    """A step that was started.

    known_there: all that it draws will be where the next step finds it, so that that can be started before anybody has
    looked. ready: `result` is known not to wait.
    """

    @property
    def plan(self) -> StepPlan: ...

    @property
    def known_there(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    def result(self) -> StepResult:
        """Wait for it. Raises what went wrong. May be asked again after an interrupt."""
        ...


class Executor(Protocol):
    """Computes steps. All methods are the step loop's, but `health_error` and the adapters' reader, which any thread
    may use."""

    facts: WorkerFacts
    # Steps that are computed at the same time at most, each of other sequences.
    steps_at_once: int

    def prepare(self, plan: StepPlan) -> None:
        """Take a plan in: what is new of sequences, blocks to move, features and adapters to let go of or to install.

        Once a plan, before `execute`; for a plan without chunks that is all. Where it fails and the plan moves blocks
        or adapters, nothing can be computed any more: WorkerDiedError from then on.
        """
        ...

    def take_pixels(self, digest: bytes, inputs: Mapping[str, torch.Tensor]) -> None:
        """Have what an image of the next step is encoded from."""
        ...

    def execute(self, plan: StepPlan) -> Execution:
        """Start the step that was prepared last. It may be prepared and run again: it writes the same values to the
        same slots."""
        ...

    def structure(self) -> CausalLM:
        """The model, to be asked for what needs no weights (what an image takes in a prompt, say)."""
        ...

    def adapter_reader(self) -> Reader:
        """Reads adapters for the model."""
        ...

    def connect_adapters(self, weights: Callable[[int], Any]) -> None:
        """weights: what the reader made of the adapter of a uid, for plans that install it."""
        ...

    def remote_grammars(self) -> RemoteGrammars | None:
        """Compiles grammars where steps are computed; None: that is this process."""
        ...

    def take_transfers(self, seconds: float = 0.0) -> TransferReport:
        """What has become of blocks beside the pool since this was asked last; before, wait until all is written, so
        many seconds at most."""
        ...

    def check_memory(self) -> None:
        """Raise QuireError where memory could not be given back and taken again, CheckpointError where the files
        changed."""
        ...

    def give_memory_back(self) -> None:
        """Give the memory of weights and blocks back, after `check_memory`. Only while nothing runs."""
        ...

    def take_blocks(self) -> None:
        """Take the memory of blocks again."""
        ...

    def read_weights(self) -> None:
        """Read the weights again. Raises CheckpointError where they cannot be read or are others now."""
        ...

    def health_error(self) -> str | None:
        """Why it can compute nothing any more; None: it can."""
        ...

    def close(self) -> None:
        """End it: no step will come."""
        ...


def lost_plan(error: BaseException) -> str:
    """Why a worker is of no use any more that could not take in a plan which moves blocks or adapters."""
    return f"a plan could not be taken in ({type(error).__name__}: {error}), and nothing after it would be right"
