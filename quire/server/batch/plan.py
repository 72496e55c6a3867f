"""What of a batch is to be done: all of its lines checked before anything is loaded, answered ones left out.

Of each line a few bytes are kept, so that files of millions of lines need no memory to speak of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.errors import QuireError
from quire.server.batch.answers import Answered
from quire.server.batch.requests import BatchRequest, lines, name_digest, read_request

_MOST_FAULTS = 10  # that are told of
_DIGEST = "S16"


@dataclass(frozen=True)
class Plan:
    """done: of each request, in the file's order, whether it has been answered. strangers: answers to no request."""

    path: Path
    most: int
    done: Any  # bool[requests]
    strangers: int

    @property
    def total(self) -> int:
        return len(self.done)

    @property
    def answered(self) -> int:
        return int(self.done.sum())

    def open_requests(self) -> Iterator[BatchRequest]:
        """The requests that have no answer, in the file's order. Raises QuireError if the file is not as it was."""
        with _opened(self.path) as file:
            place = -1
            for place, (number, line) in enumerate(lines(file, self.most)):
                if place >= self.total:
                    break
                if self.done[place]:
                    continue
                try:
                    yield read_request(line)
                except ValueError:
                    raise QuireError(f"{self.path}: line {number} has changed since it was checked.") from None
            if place + 1 != self.total:
                raise QuireError(f"{self.path}: has changed since it was checked.")


def make_plan(path: Path, answered: Answered, most: int) -> Plan:
    """Check a batch. most: bytes of a body.

    Raises QuireError, with the first faults and their lines, for one that has any: lines that are no requests, a
    custom_id that is there twice, an answer to another request of the same custom_id.
    """
    names, ids = bytearray(), bytearray()
    faults: list[str] = []
    with _opened(path) as file:
        for number, line in lines(file, most):
            try:
                request = read_request(line)
            except ValueError as error:
                faults.append(f"line {number} {_as_end(str(error))}")
                if len(faults) > _MOST_FAULTS:
                    break
                continue
            names += name_digest(request.custom_id)
            ids += name_digest(request.id)
        if not faults:
            faults = _repeated(file, most, np.frombuffer(names, _DIGEST))
    _refuse(path, faults)
    done, strangers = _compared(path, np.frombuffer(names, _DIGEST), np.frombuffer(ids, _DIGEST), answered)
    return Plan(path, most, done, strangers)


def _as_end(reason: str) -> str:
    """A reason as the end of a sentence that begins with the line."""
    return reason if reason.startswith(("has ", "is ")) else f"is refused: {reason}"


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise QuireError(f"{path}: cannot be read ({error.strerror or error}).") from None


def _repeated(file: BinaryIO, most: int, names: Any) -> list[str]:
    """A fault for each custom_id that another line has before."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not len(again):
        return []
    pairs = {int(order[place + 1]): int(order[place]) for place in again[: _MOST_FAULTS + 1]}
    wanted = {*pairs, *pairs.values()}
    file.seek(0)
    found = {place: line for place, line in enumerate(lines(file, most)) if place in wanted}
    return [
        f"line {found[place][0]} has the custom_id {read_request(found[place][1]).custom_id[:64]!r} of line "
        f"{found[first][0]}"
        for place, first in sorted(pairs.items())
    ]


def _compared(path: Path, names: Any, ids: Any, answered: Answered) -> tuple[Any, int]:
    """(of each request whether it has been answered, answers to no request)"""
    known, known_ids = np.frombuffer(answered.names, _DIGEST), np.frombuffer(answered.ids, _DIGEST)
    order = np.argsort(known, kind="stable")
    places = np.searchsorted(known, names, sorter=order) if len(known) else np.zeros(len(names), np.int64)
    done = np.zeros(len(names), bool)
    inside = places < len(known)
    found = order[places[inside]]
    done[inside] = known[found] == names[inside]
    changed = np.flatnonzero(done)[~np.isin(ids[done], known_ids)]
    if len(changed):
        raise QuireError(
            f"{path}: {len(changed)} of its requests (the first is number {int(changed[0]) + 1}) have answers by their "
            "custom_id that are to other requests: take another file for the answers."
        )
    return done, int((~np.isin(known, names)).sum())


def _refuse(path: Path, faults: list[str]) -> None:
    if faults:
        told = "; ".join(faults[:_MOST_FAULTS]) + ("; and more" if len(faults) > _MOST_FAULTS else "")
        raise QuireError(f"{path}: {told}. Nothing was begun.")
