"""Compiled grammars, kept for the next request that asks for the same, and the thread that compiles them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from quire.errors import OverloadedError, RequestError
from quire.platform.sampling.structured.constraint import CompiledConstraint
from quire.platform.sampling.structured.template import Template
from quire.platform.sampling.structured.vocabulary import Vocabulary, VocabularySource

_T = TypeVar("_T")

_MOST_KEPT = 96  # of constraints; one of common use takes well under a megabyte, and none more than a few ten
_STACK_BYTES = 512 << 20  # of address space: grammars are compiled by recursion, as deep as they are nested
_MOST_AWAITED = 512  # constraints that were compiled for requests which have not come yet
_SECONDS = 20.0  # for one request's grammars, and as many to wait for those of others
_RETRY_AFTER = 10  # seconds, where that is not enough
_MOST_STUCK = 4  # compilations that have taken longer and still run
_NICE = 15  # threads that compute steps get thirty times the time of those that compile


class Grammars:
    """Compiled constraints over one vocabulary: those that were asked for last. Any thread may ask."""

    def __init__(self, source: VocabularySource) -> None:
        self.vocabulary = Vocabulary(source)
        self._lock = threading.Lock()
        self._templates: OrderedDict[CompiledConstraint, Template] = OrderedDict()
        self._awaited: OrderedDict[CompiledConstraint, list[Template]] = OrderedDict()
        self._work = Compilations()
        _known[source.digest] = self

    def template(self, constraint: CompiledConstraint) -> Template:
        """The compiled form. Raises RequestError for what llguidance refuses."""
        with self._lock:
            known = self._templates.get(constraint)
            if known is not None and not known.is_worn:
                self._templates.move_to_end(constraint)
                return known
        made = Template(constraint, self.vocabulary)
        with self._lock:
            self._templates[constraint] = made
            self._templates.move_to_end(constraint)
            while len(self._templates) > _MOST_KEPT:
                self._templates.popitem(last=False)
        return made

    def prepare(self, constraint: CompiledConstraint) -> None:
        """Compile a constraint in a thread that gives way to those of steps, for one request that is to come.

        Raises RequestError, OverloadedError.
        """
        template = self._work.run(lambda: self.template(constraint))
        with self._lock:
            self._awaited.setdefault(constraint, []).append(template)
            self._awaited.move_to_end(constraint)
            while len(self._awaited) > _MOST_AWAITED:
                self._awaited.popitem(last=False)

    def prepared(self, constraint: CompiledConstraint) -> Template:
        """What `prepare` has made for a request. Only if that was given up long ago, it is compiled now."""
        with self._lock:
            waiting = self._awaited.get(constraint)
            if waiting:
                made = waiting.pop()
                if not waiting:
                    del self._awaited[constraint]
                return made
        return self.template(constraint)


_known: WeakValueDictionary[bytes, Grammars] = WeakValueDictionary()


def grammars_of(digest: bytes) -> Grammars:
    """Those of this process over a vocabulary."""
    return _known[digest]


class _Job(Generic[_T]):
    """A function to call; who has it called waits for it to begin, and then for its end."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self.function = function
        self.begun = threading.Event()
        self.result: Future[_T] = Future()


class Compilations:
    """One thread that gives way to those of steps. One that is stuck is left behind, and another takes over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[_Job[Any]] = []
        self._thread: threading.Thread | None = None
        self._stuck: set[threading.Thread] = set()

    def run(self, function: Callable[[], _T]) -> _T:
        """What a function returns. Raises RequestError where that takes too long, OverloadedError where others do."""
        job, limit = _Job(function), _SECONDS
        with self._lock:
            if len(self._stuck) >= _MOST_STUCK:
                raise OverloadedError("too many grammars take too long to compile: try again later.", _RETRY_AFTER)
            self._jobs.append(job)
            if self._thread is None:
                self._thread = _deep_thread(self._serve)
        if not job.begun.wait(limit) and job.result.cancel():
            raise OverloadedError(
                f"structured_outputs: the grammars of other requests have taken over {limit:g} s to compile: "
                "try again later.",
                _RETRY_AFTER,
            )
        try:
            return job.result.result(limit)
        except FutureTimeoutError:
            return self._leave_behind(job, limit)

    def _leave_behind(self, job: _Job[_T], limit: float) -> _T:
        """Have another thread go on, unless the job is done at last."""
        with self._lock:
            if job.result.done():
                return job.result.result()
            assert self._thread is not None  # it is this job's: it has no other before it is done
            self._stuck.add(self._thread)
            self._thread = _deep_thread(self._serve) if self._jobs else None
        raise RequestError(f"structured_outputs: this shape takes over {limit:g} s to compile; ask for a smaller one.")

    def _serve(self) -> None:
        """Until there is nothing to do, or another thread has taken over."""
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux
        this = threading.current_thread()
        while True:
            with self._lock:
                if this in self._stuck:
                    self._stuck.remove(this)
                    return
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.pop(0)
            if not job.result.set_running_or_notify_cancel():
                continue
            job.begun.set()
            try:
                made = job.function()
            except BaseException as error:
                job.result.set_exception(error)
            else:
                job.result.set_result(made)


def _deep_thread(run: Callable[[], None]) -> threading.Thread:
    """A thread that was started, with a stack that no grammar within the limits exhausts."""
    thread = threading.Thread(target=run, name="quire-grammars", daemon=True)
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
