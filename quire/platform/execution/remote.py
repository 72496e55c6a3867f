"""The executor whose worker is in another process, wherever that is: a `Link` leads there.

The worker builds the model by itself, from the same settings. Adapters are read over there, where the weights are that
they are checked against and folded with: here there is a handle of each, and what is said of it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from quire.config import EngineConfig
from quire.config.speculative import drafts_by_model
from quire.errors import QuireError, WorkerDiedError
from quire.lora.adapter import Bound
from quire.models.base import CausalLM
from quire.models.loader import load_structure
from quire.platform.execution.executor import WorkerFacts
from quire.platform.execution.link import Link
from quire.platform.execution.remote_step import RemoteStep, WatchedSequences
from quire.platform.execution.wire import pack, pack_plan, unpack
from quire.platform.execution.worker import purpose_of
from quire.platform.execution.worker_process import Answer, Place, Start
from quire.platform.kv.connector import TransferReport
from quire.platform.scheduling.plan import StepPlan

if TYPE_CHECKING:
    from quire.platform.sampling.structured.constraint import CompiledConstraint
    from quire.platform.sampling.structured.vocabulary import VocabularySource

logger = logging.getLogger("quire")

# A worker that has not answered for so long hangs: longer than any step, and reading weights again, should take.
ANSWER_SECONDS = 600.0
_LOOK_SECONDS = 1.0  # between two looks at whether it lives
_SMALL_BYTES = 32 << 10  # of a message: a socket has room for as many of them as stages have steps in flight
_LAST_SECONDS = 5.0  # between the end of its connection and what is known of its own
_ERRANDS = {"read": "read an adapter", "vocabulary": "take a vocabulary", "grammar": "compile a grammar"}


@dataclass(frozen=True, eq=False)
class RemoteAdapter:
    """An adapter whose weights are the worker's. The fields are `Adapter`'s; modules: layers that it changes."""

    handle: int
    digest: bytes
    nbytes: int
    modules: int
    visual: bool
    ranks: tuple[int, ...]
    mixable: bool
    bound: Bound


class ProcessGrammars:
    """Compiles grammars in the worker's process, as `RemoteGrammars` says."""

    def __init__(self, errand: Callable[..., Any]) -> None:
        self._errand = errand

    def take_vocabulary(self, source: VocabularySource) -> None:
        self._errand("vocabulary", source)

    def compile(self, digest: bytes, constraint: CompiledConstraint) -> None:
        self._errand("grammar", digest, constraint)


class RemoteExecutor:
    """Sends the worker's process what is to be done. What its methods mean, `Executor` says.

    Raises what `Worker` raises; and WorkerDiedError from all that waits for a worker that is no more.
    """

    steps_at_once = 1

    def __init__(
        self, config: EngineConfig, path: Path, link: Link, place: Place | None = None, threads: int = 0
    ) -> None:
        """place: of the worker among several; its facts come with `take_facts` then. threads: its own; 0: as many as
        this process's."""
        self.config, self._path = config, path
        self.link = link
        self._steps = link.steps
        self._number = 0  # of the last message that wants an answer
        self._answers: dict[int, Answer] = {}  # that nobody has asked for yet
        self._waiting: set[int] = set()  # numbers of messages that are not answered yet
        self._outbox: list[bytes] = []
        self._forgotten: deque[int] = deque()  # handles of adapters that nobody has here any more
        self._weights: Callable[[int], RemoteAdapter] | None = None
        self._broken: str | None = None
        self._watched = WatchedSequences()
        self._ahead: int | None = None  # the number of the last step, where the next one may go on from it
        self._idle: SimpleQueue[Connection] = SimpleQueue()  # for errands
        for channel in link.errands:
            bound_waiting(channel.fileno())
            self._idle.put(channel)
        self._readable = select.poll()
        self._readable.register(self._steps, select.POLLIN)
        level = logging.getLogger("quire").getEffectiveLevel()
        # What waits, before a large message, for steps of which this worker computes a part.
        self.before_large: Callable[[], None] = lambda: None
        try:
            # Whether the worker goes on by itself from what a step has drawn. A draft model reads tokens before they
            # are filled in; and of several stages the last one draws, and the first one looks up.
            drafts = drafts_by_model(config.scheduler.speculative_config)
            self._goes_on = not drafts and (place is None or place.stages == 1)
            bound_sending(self._steps.fileno())
            start = Start(config, str(path), threads or torch.get_num_threads(), level, place)
            self._steps.send_bytes(_pack_start(start))
            self.facts: WorkerFacts
            if place is None:
                self.take_facts()
        except BaseException:
            self.close()
            raise

    def take_facts(self) -> None:
        """Wait until the worker has loaded its model. Raises what `Worker` raises."""
        self.facts = self._wait_for(0, seconds=float("inf"))  # weights may have to be read

    def look_for(self, number: int, seconds: float) -> Answer | None:
        """What answers the message of a number, if it comes within so many seconds. Raises WorkerDiedError."""
        if number not in self._answers and self._readable.poll(seconds * 1000):
            self._receive()
        if number not in self._answers and self.health_error() is not None:
            raise WorkerDiedError(str(self._broken))
        return self._answers.get(number)

    def answer(self, number: int) -> Any:
        """What answers the message of a number, once it does. Raises what went wrong."""
        return self._wait_for(number)

    # -- plans ----------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        self._watched.take(plan)
        handles = {}
        if plan.install:
            assert self._weights is not None
            handles = {uid: self._weights(uid).handle for uid in plan.install}
        self._post("prepare", *pack_plan(plan), handles)
        while self._forgotten:  # behind the plan that takes them off the device
            self._post("forget", self._forgotten.popleft())
        if not plan.chunks:
            with suppress(WorkerDiedError):  # whoever wants tokens will hear of it
                self._send(None)

    def take_pixels(self, digest: bytes, inputs: Mapping[str, torch.Tensor]) -> None:
        with self._guarded():
            told = self.link.pixels(inputs)
        self._post("pixels", digest, *told)
        self._send(None)

    def execute(self, plan: StepPlan) -> RemoteStep:
        behind = self._ahead is not None and self._ahead in self._waiting
        known_there = self._goes_on and self._watched.none_in(plan)
        self._ahead = None
        number = self._ask("execute", behind)
        self._ahead = number if known_there else None
        return RemoteStep(plan, number, self.answer, known_there)

    def structure(self) -> CausalLM:
        model = self.config.model
        return load_structure(
            self._path, model.load_format, model.hf_overrides, model.model_impl, purpose_of(self.config)
        )

    # -- adapters -------------------------------------------------------------------------------------------------

    def adapter_reader(self) -> RemoteExecutor:
        return self

    def connect_adapters(self, weights: Callable[[int], RemoteAdapter]) -> None:
        self._weights = weights

    def read(self, directory: Path) -> RemoteAdapter:
        """Have an adapter read. Any thread may call this. Raises AdapterError."""
        adapter = RemoteAdapter(*self._errand("read", str(directory)))
        weakref.finalize(adapter, self._forgotten.append, adapter.handle).atexit = False
        return adapter

    def _errand(self, kind: str, *given: Any) -> Any:
        """Have something done beside the steps, and wait for it, as long as for a step. Any thread may call this.
        Raises what went wrong."""
        channel = self._idle.get()
        try:
            channel.send_bytes(pack((kind, given)))
            deadline = time.monotonic() + ANSWER_SECONDS
            while not channel.poll(_LOOK_SECONDS):  # a machine that has lost its power closes nothing
                if self.health_error() is not None:
                    raise WorkerDiedError(str(self._broken))
                if time.monotonic() > deadline and not channel.poll(0):  # this process may have been stopped itself
                    raise BlockingIOError
            value, error = unpack(channel.recv_bytes())
        except BlockingIOError:
            self._broken = self._broken or (
                f"the worker's process has not answered for {ANSWER_SECONDS:g} s, asked to {_ERRANDS[kind]}, and was "
                "ended"
            )
            self.link.end()
            raise WorkerDiedError(self._broken) from None
        except (EOFError, OSError):
            raise WorkerDiedError(self.health_error() or "the worker's process has ended") from None
        finally:
            self._idle.put(channel)
        if error is not None:
            raise unpack(error)
        return value

    # -- grammars -------------------------------------------------------------------------------------------------

    def remote_grammars(self) -> ProcessGrammars:
        return ProcessGrammars(self._errand)

    # -- memory ---------------------------------------------------------------------------------------------------

    def take_transfers(self, seconds: float = 0.0) -> TransferReport:
        report: TransferReport = self.answer(self.ask_transfers(seconds))
        return report

    def ask_transfers(self, seconds: float) -> int:
        """Ask for what `take_transfers` returns; returns the message's number."""
        return self._ask("transfers", seconds)

    def check_memory(self) -> None:
        self.answer(self.ask_memory("check"))

    def give_memory_back(self) -> None:
        self.answer(self.ask_memory("give_back"))

    def take_blocks(self) -> None:
        self.answer(self.ask_memory("take_blocks"))

    def read_weights(self) -> None:
        self.answer(self.ask_memory("read_weights"))

    def ask_memory(self, what: str) -> int:
        """Ask for what `GivenMemory` does under this name; returns the message's number."""
        return self._ask("memory", what)

    # -- life -----------------------------------------------------------------------------------------------------

    def health_error(self) -> str | None:
        if self._broken is None:
            self._broken = self.link.ending()
        return self._broken

    def close(self) -> None:
        self._broken = self._broken or "the engine was closed"
        self.link.end()

    def _post(self, *message: Any) -> None:
        """Have a message sent with the next one that is."""
        self._outbox.append(pack(message))

    def _ask(self, *message: Any) -> int:
        """Send a message that is answered; returns its number, for `_wait_for`."""
        self._number += 1
        self._send(self._number, pack(message))
        return self._number

    def _send(self, number: int | None, *last: bytes) -> None:
        """What was posted, and what comes behind that. After an interrupt, what was posted is sent with the next."""
        data = pack((number, [*self._outbox, *last]))
        if len(data) > _SMALL_BYTES:
            self.before_large()
            self._take_answers()
        with self._guarded():
            self._steps.send_bytes(data)
            self._outbox = []
            if number is not None:
                self._waiting.add(number)

    def _take_answers(self) -> None:
        """Wait for all that the worker still has to say: it takes no large message while it says something large."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._waiting:
            self.look_for(min(self._waiting), _LOOK_SECONDS)
            if self._waiting and time.monotonic() > deadline:
                self._end_silent()
                raise WorkerDiedError(str(self._broken))

    def _wait_for(self, number: int, seconds: float | None = None) -> Any:
        """What answers a message. An interrupt while this waits loses nothing."""
        deadline = time.monotonic() + (ANSWER_SECONDS if seconds is None else seconds)
        while number not in self._answers:
            if self._readable.poll(_LOOK_SECONDS * 1000):
                self._receive()
            elif self.health_error() is not None:
                raise WorkerDiedError(str(self._broken))
            elif time.monotonic() > deadline:
                self._end_silent()
        answer = self._answers.pop(number)
        if answer.lost is not None:
            self._broken = answer.lost
            self.link.end()
            raise WorkerDiedError(self._broken)
        if answer.error is not None:
            raise unpack(answer.error)
        return answer.value

    def _end_silent(self) -> None:
        self._broken = f"the worker's process has not answered for {ANSWER_SECONDS:g} s and was ended"
        self.link.end()

    def _receive(self) -> None:
        with self._guarded():
            answer: Answer = unpack(self._steps.recv_bytes())
            self._answers[answer.number] = answer
            self._waiting.discard(answer.number)
        for record in answer.logs:
            if logging.getLogger(record.name).isEnabledFor(record.levelno):
                logging.getLogger(record.name).handle(record)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around what a dead worker, or an interrupt amid a message, breaks for good."""
        if self._broken is not None:
            raise WorkerDiedError(self._broken)
        try:
            yield
        except BlockingIOError:
            self._broken = f"the worker's process has taken nothing for {ANSWER_SECONDS:g} s and was ended"
            self.link.end()
            raise WorkerDiedError(self._broken) from None
        except (EOFError, OSError):
            # Its last words came before its end.
            self._broken = self.link.ending(_LAST_SECONDS) or "the worker's process has closed its pipe"
            raise WorkerDiedError(self._broken) from None
        except BaseException:
            self._broken = "an interrupt has cut a message to the worker's process short"
            self.link.end()
            raise


def _pack_start(start: Start) -> bytes:
    try:
        return pack(start)
    except (PicklingError, TypeError, AttributeError) as error:
        raise QuireError(f"a setting cannot be sent to another process: {error}") from error


def bound_sending(descriptor: int) -> None:
    """Let a message that a hanging worker does not take, and that fills the socket, raise BlockingIOError."""
    _bound(descriptor, socket.SO_SNDTIMEO)


def bound_waiting(descriptor: int) -> None:
    """And one that does not come, or not to its end."""
    _bound(descriptor, socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)


def _bound(descriptor: int, *options: int) -> None:
    seconds, rest = divmod(ANSWER_SECONDS, 1)
    with socket.socket(fileno=os.dup(descriptor)) as same:
        for option in options:
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(rest * 1e6)))
