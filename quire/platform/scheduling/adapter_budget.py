"""Whose adapters are on the device, and who may pass whom while some wait for theirs.

A sequence whose adapter finds no room lets others pass: those of the base model, and of adapters that are there
already, of the latter `max_num_seqs` at most (among the first thousand that wait). So what does not fit waits for a
bounded number of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from quire.lora import DeviceAdapterBudget
from quire.platform.scheduling.request import Request, SequenceState

_READ_AHEAD = 16  # how many waiting sequences have their adapters read ahead


class AdapterBudget:
    """The adapters of sequences: held while these run.

    device: the account of what is there; None where no adapters are served, and no request has any.
    max_passed: how many sequences with adapters may pass one that waits.
    """

    def __init__(self, device: DeviceAdapterBudget | None, max_passed: int) -> None:
        self.device = device
        self._max_passed = max_passed
        self._blocked: list[SequenceState] = []  # that wait for their adapters, as far as this plan has looked
        self._failed: list[tuple[Request, str]] = []

    def begin(self) -> None:
        """The waiting sequences are looked at from the first one on."""
        self._blocked.clear()

    def acquire(self, sequence: SequenceState) -> bool:
        """Hold a waiting sequence's adapters; False: it waits for them, or must not pass one that has waited long."""
        request = sequence.request
        if self.device is None or not request.adapters:
            return True
        if len(self._blocked) >= 2 * self._max_passed:
            return False
        patient = all(other.passed_by < self._max_passed for other in self._blocked)
        if patient and self.device.hold(request.adapters, urgent=not self._blocked):
            return True
        error = self.device.failure(request.adapters)
        if error is not None:
            self._failed.append((request, error))
        self._blocked.append(sequence)
        return False

    def admitted(self, sequence: SequenceState) -> None:
        """A sequence was admitted: if it has adapters, it has passed those that wait for theirs."""
        if sequence.request.adapters:
            for blocked in self._blocked:
                blocked.passed()

    def lacks(self, request: Request) -> bool:
        """Whether some adapter of a request is not on the device."""
        return self.device is not None and any(ref.uid not in self.device for ref, _ in request.adapters)

    def share(self, sequence: SequenceState) -> None:
        """A sequence that runs has forked: hold its adapters once more."""
        if self.device is not None:
            self.device.hold(sequence.request.adapters)

    def release(self, sequence: SequenceState) -> None:
        """A sequence runs no more, or was not admitted after all."""
        if self.device is not None:
            self.device.release(sequence.request.adapters)

    def prefetch(self, waiting: Iterable[SequenceState]) -> None:
        """Have the adapters of the first that wait read into main memory."""
        if self.device is None:
            return
        doomed = [request for request, _ in self._failed]
        for sequence in islice(waiting, _READ_AHEAD):
            if sequence.request not in doomed:
                self.device.prefetch(sequence.request.adapters)

    def settle(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Let go of what was unloaded; returns what has changed on the device since: (installed, dropped), by uid."""
        if self.device is None:
            return (), ()
        self.device.settle()
        return self.device.take_changes()

    def check_integrity(self, running: Iterable[SequenceState]) -> None:
        """Raise AssertionError unless the account agrees with what the sequences that run hold."""
        if self.device is not None:
            self.device.check_integrity(sequence.request.adapters for sequence in running)

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests whose adapters cannot be had, and why: those since the last call."""
        failed, self._failed = self._failed, []
        return failed
