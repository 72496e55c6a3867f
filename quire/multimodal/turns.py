"""Whose turn it is among jobs of media: workers that fetch, that prepare images, and that prepare videos and sounds.

Each kind of work has workers of its own, so that none waits for another: an image passes videos on any machine. Within
one, jobs go in the order in which they came, and whoever has taken long, or is going to, lets others past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

from quire.multimodal.jobs import MOST_PASSED, Job, Stage

# Pixels of an image that is large: such images leave a worker to others, and take turns for memory.
_LARGE_PIXELS = 4_000_000
_FETCHING = 32  # URLs that are read at once
_OF_A_HOST = 8  # and of them, those of one host: one that is slow keeps nobody else out


class Lane:
    """The workers of one kind of work. All that is decoded by them at once takes no more memory than the largest may
    alone.

    workers: how many. most_pixels: of the largest. jobs: which they are at. decoding: pixels of each that is being
    decoded and processed.
    """

    def __init__(self, workers: int, most_pixels: int) -> None:
        self.workers = workers
        self.most_pixels = most_pixels
        self.jobs: set[Job] = set()
        self.decoding: list[int] = []
        self.next_large: Job | None = None  # whose image has let so many before it that no other large one begins

    def fits(self, job: Job, without: int = 0) -> bool:
        """Whether its image can be decoded now. Large ones leave a worker to the others. without: pixels of one that
        is being decoded, and would not be."""
        if job.opened is None or job.pixels <= _LARGE_PIXELS:
            return True
        decoding = list(self.decoding)
        if without:
            decoding.remove(without)
        if not decoding:
            return True
        if self.next_large not in (None, job):
            return False
        large = sum(others > _LARGE_PIXELS for others in decoding)
        return large < max(1, self.workers - 1) and job.pixels <= self.most_pixels - sum(decoding)


class Turns:
    """The jobs that wait, those that have begun, and who is next. To be used by one thread at a time.

    full: whether pixels that are ready fill their share of memory; files_full: whether files do that were fetched.
    queue, urgent: jobs that have not begun. running: those that have begun, and whose results somebody waits for;
    begun: those of them that no worker is at.
    """

    def __init__(
        self, workers: int, most_pixels: int, full: Callable[[], bool], files_full: Callable[[], bool]
    ) -> None:
        self._full, self._files_full = full, files_full
        self.lanes: dict[Stage, Lane] = {
            "fetch": Lane(_FETCHING, most_pixels),
            "image": Lane(workers, most_pixels),
            "media": Lane(workers, most_pixels),
        }
        self.queue: deque[Job] = deque()
        self.urgent: deque[Job] = deque()
        self.begun: set[Job] = set()
        self.running: list[Job] = []

    def add(self, job: Job) -> None:
        """A job waits."""
        (self.urgent if job.urgent else self.queue).append(job)

    def cancel(self, key: Hashable) -> None:
        """Nobody waits for a job any more; a worker that is at it will find out."""
        for job in self.running:
            job.gone = job.gone or job.key == key
        for job in [job for job in self.begun if job.gone]:
            self.begun.remove(job)
            job.let_go()
        self.queue = deque(job for job in self.queue if job.key != key)
        self.urgent = deque(job for job in self.urgent if job.key != key)
        self.running = [job for job in self.running if job.key != key]

    def close(self) -> None:
        """Nobody waits for any of them."""
        for job in self.running:
            job.gone = True
        for jobs in (self.queue, self.urgent, self.begun):
            jobs.clear()

    def next(self) -> Job | None:
        """The job whose turn it is, and which a worker is at from now on."""
        if not (self.urgent or self.queue or self.begun):  # in most steps of most engines
            for lane in self.lanes.values():
                lane.next_large = None
            return None
        for stage, lane in self.lanes.items():
            job = self._next_of(stage, lane) if len(lane.jobs) < lane.workers else None
            if job is not None:
                job.at = stage
                lane.jobs.add(job)
                return job
        return None

    def leave(self, job: Job, ended: bool) -> bool:
        """No worker is at it any more. Returns whether somebody waits for it."""
        self.lanes[job.at].jobs.discard(job)
        waited_for = job in self.running
        if waited_for and ended:
            self.running.remove(job)
        elif waited_for:
            self.begun.add(job)
        return waited_for

    def others_first(self, job: Job, seconds: float) -> bool:
        """Whether, of those that wait, one is due before a job that a worker has been at for so many seconds."""
        if any(one.stage == job.at for one in self.urgent):
            return True
        lane = self.lanes[job.at]
        without, due = job.pixels if job.is_decoded else 0, job.due_after(seconds)
        return any(one.due < due for one in self._candidates(job.at) if lane.fits(one, without))

    def _next_of(self, stage: Stage, lane: Lane) -> Job | None:
        urgent = next((job for job in self.urgent if job.stage == stage), None)
        if urgent is not None:
            self.running.append(urgent)
            self.urgent.remove(urgent)
            return urgent
        lane.next_large = None
        waiting = (job for job in self.begun if job.stage == stage and not lane.fits(job))
        kept_out = min(waiting, key=lambda one: one.due, default=None)
        if kept_out is not None and kept_out.passed >= MOST_PASSED:
            lane.next_large = kept_out
            if all(pixels <= _LARGE_PIXELS for pixels in lane.decoding):  # which are done in a moment: then it fits
                return None
        job = min((one for one in self._candidates(stage) if lane.fits(one)), key=lambda one: one.due, default=None)
        if kept_out is not None and job is not None:
            kept_out.passed += 1
        if job in self.begun:
            self.begun.remove(job)
        elif job is not None:
            self.running.append(job)
            self.queue.remove(job)
        return job

    def _candidates(self, stage: Stage) -> Iterator[Job]:
        """Those that may go on or begin: what has begun must end, also where memory is full, but not all at once."""
        full = self._full()
        most = self.lanes["image"].workers if full else len(self.running)
        if stage == "fetch" and self._files_full():
            full, most = True, 1
        ready = [job for place, job in enumerate(self.running) if place < most or job.urgent]
        yield from (job for job in ready if job in self.begun and job.stage == stage and self._may_ask(job))
        if not full:
            first = next((job for job in self.queue if job.stage == stage and self._may_ask(job)), None)
            if first is not None:
                yield first

    def _may_ask(self, job: Job) -> bool:
        """Whether its host is not being asked for too many files already."""
        host = job.host
        return host is None or sum(one.host == host for one in self.lanes["fetch"].jobs) < _OF_A_HOST
