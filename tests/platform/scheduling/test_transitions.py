"""Requests and sequences change by named transitions, and in scheduling alone."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import quire
from quire.config import SchedulerConfig
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.sampling.results import Failure, Sampled
from quire.platform.scheduling.request import MediaInput, Request, SequenceState
from quire.platform.scheduling.scheduler import Scheduler
from tests.platform.scheduling.test_bookkeeping import EOS, make_request

FIELDS = {
    *SequenceState.__slots__,
    *(field.name for kind in (Request, MediaInput) for field in dataclasses.fields(kind)),
}
MUTATORS = {"append", "extend", "insert", "remove", "clear", "pop"}
NAMES = {"request", "sequence", "media", "beam", "branch", "child", "job.request", "job.media", "prepared.request"}


def changes(path: Path, source: str | None = None) -> list[str]:
    """Assignments to fields of what is called a request, a sequence or media, and calls that change their lists."""
    found = []
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for one in node.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in FIELDS and ast.unparse(target.value) in NAMES:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(target)}")
    return found


def test_only_scheduling_changes_requests() -> None:
    platform = Path(quire.__file__).parent / "platform"
    elsewhere = [path for path in platform.rglob("*.py") if path.parent.name != "scheduling"]
    assert [one for path in elsewhere for one in changes(path)] == []


@pytest.mark.parametrize(
    "source",
    ["request.failure = None", "a, sequence.stop_reason = 1, 2", "job.media.pixels = x", "request.sequences.append(1)"],
)
def test_the_search_sees_a_change(source: str) -> None:
    assert changes(Path("x.py"), source)


def scene() -> tuple[Scheduler, Request]:
    scheduler = Scheduler(SchedulerConfig(4, 64), KVManager(BlockPool(16, 4)))
    request = make_request("a", [1, 2, 3], 2, 3)
    scheduler.add(request)
    return scheduler, request


def test_from_waiting_to_running_and_back() -> None:
    scheduler, request = scene()
    (sequence,) = request.sequences
    assert not sequence.running and scheduler.waiting[0] is sequence
    scheduler.plan()
    assert sequence.running and scheduler.running == [sequence] and request.metrics.first_scheduled_time is not None
    scheduler._preempt(sequence)  # what a plan does when blocks run out
    assert not sequence.running and sequence.num_computed == 0 and request.metrics.num_preemptions == 1
    assert not scheduler.kv.blocks(sequence.id)
    scheduler.check_integrity()


def test_pending_tokens_come_or_go() -> None:
    _, request = scene()
    (sequence,) = request.sequences
    sequence.append_pending()
    assert sequence.num_uncomputed == 4 and not sequence.last_pending
    sequence.append(Sampled(4))
    assert sequence.token_ids == [1, 2, 3, 4] and sequence.output_ids == [4] and sequence.finish_reason is None
    sequence.append(Sampled(5))
    sequence.append_pending()
    assert sequence.last_pending
    sequence.finish("abort")
    assert sequence.output_ids == [4, 5] and sequence.finish_reason == "abort"
    sequence.finish("length")
    assert sequence.finish_reason == "abort", "the first reason stays"


@pytest.mark.parametrize(("token", "reason"), [(EOS, "stop"), (5, None)])
def test_the_last_token_finishes(token: int, reason: str | None) -> None:
    _, request = scene()
    (sequence,) = request.sequences
    sequence.append(Sampled(token))
    assert sequence.finish_reason == reason and sequence.stop_reason is None


def test_a_fork_has_lists_of_its_own() -> None:
    _, request = scene()
    (parent,) = request.sequences
    child = parent.fork(1)
    assert request.sequences == [parent, child] and parent.order < child.order
    child.append(Sampled(4))
    assert parent.token_ids == [1, 2, 3] and child.token_ids == [1, 2, 3, 4]


def test_a_request_fails_once_it_runs_and_before() -> None:
    scheduler, request = scene()
    scheduler.plan()
    unserved = make_request("b", [1], 1, 1)
    for one in (request, unserved):
        scheduler.fail(one, Failure("no", by_caller=True))
        assert one.finished and one.sequences[0].finish_reason == "error" and one.failure == Failure("no", True)
        assert one.metrics.finished_time is not None
    assert not scheduler.has_work and scheduler.kv.pool.num_owned == 0
    scheduler.check_integrity()


def test_a_stop_string_counts_before_any_other_end() -> None:
    scheduler, request = scene()
    (sequence,) = request.sequences
    scheduler.finish(sequence, "length")
    scheduler.stop_at(sequence, "END")
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")
