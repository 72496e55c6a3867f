"""The output processor: each sequence has a text of its own, wherever it forks, and nothing is kept of who has gone."""

from __future__ import annotations

from typing import Any

import pytest

from quire import BeamSearchOutput, BeamSearchParams, RequestOutputKind, SamplingParams
from quire.platform.outputs.processor import OutputProcessor
from quire.platform.sampling.results import Failure, Sampled
from quire.platform.scheduling.beam import BeamGroup
from quire.platform.scheduling.request import Request, SequenceState
from tests.platform.outputs.test_stop_strings import byte_ids, byte_tokens

TOKENIZER = byte_tokens()


def request_for(name: str = "a", **params: Any) -> Request:
    settings = SamplingParams(**{"max_tokens": 100, "ignore_eos": True, **params})
    none: frozenset[int] = frozenset()
    return Request(
        request_id=name,
        prompt=None,
        prompt_ids=byte_ids(b"p"),
        params=settings,
        max_tokens=100,
        seeds=tuple(range(settings.n)),
        eos_ids=none,
        stop_ids=none,
        prefix_root=b"",
    )


def give(sequence: SequenceState, data: bytes) -> None:
    for token in byte_ids(data):
        sequence.append(Sampled(token))


def texts(processor: OutputProcessor, request: Request) -> list[str]:
    output = processor.output(request, request.finished)
    assert output is not None and not isinstance(output, BeamSearchOutput)
    return [one.text for one in output.outputs]


def begun(request: Request) -> tuple[OutputProcessor, SequenceState]:
    processor = OutputProcessor(TOKENIZER)
    processor.add(request)
    return processor, request.begin()


@pytest.mark.parametrize(
    "before", [b"", b"abc", "x\u00e9\u00e9".encode()[:-1]], ids=["at once", "late", "in a character"]
)
@pytest.mark.parametrize("taken", [False, True])
def test_a_fork_has_the_text_of_all_its_tokens(before: bytes, taken: bool) -> None:
    request = request_for(n=2)
    processor, parent = begun(request)
    give(parent, before)
    if taken:
        assert processor.take(parent) is None
    child = parent.fork(1)
    ends = [
        "\u00e9".encode()[-1:] + b" one" if before else b" one",
        "\u00e9".encode()[-1:] + b" two" if before else b" two",
    ]
    for sequence, end in zip((parent, child), ends, strict=True):
        give(sequence, end)
        assert processor.take(sequence) is None
        sequence.finish("length")
        processor.take(sequence)
    assert texts(processor, request) == [(before + end).decode(errors="replace") for end in ends]


def test_many_tokens_at_once_are_the_text_of_one_by_one() -> None:
    data = "so it goes, \u00e9\u00e8\u4e2d\u6587 and on".encode()
    one, other = request_for("a"), request_for("b")
    processor, slow = begun(one)
    processor.add(other)
    quick = other.begin()
    for token in byte_ids(data):
        slow.append(Sampled(token))
        assert processor.take(slow) is None
    give(quick, data)
    assert processor.take(quick) is None
    assert texts(processor, one) == texts(processor, other) == [data.decode()]


@pytest.mark.parametrize("fork", [0, 3, 6])
def test_a_stop_string_is_found_in_each_fork_and_ends_nobody_here(fork: int) -> None:
    """The processor says that the text has reached it; to end the sequence is the scheduler's."""
    request = request_for(n=2, stop=["-stop-"])
    processor, parent = begun(request)
    give(parent, b"ab-sto"[:fork])
    processor.take(parent)
    child = parent.fork(1)
    give(parent, b"ab-sto"[fork:] + b"p-")
    give(child, b"ab-sto"[fork:] + b"x")
    assert processor.take(parent) == "-stop-" and processor.take(child) is None
    assert parent.finish_reason is None and parent.stop_reason is None and child.finish_reason is None
    assert texts(processor, request) == ["ab", "ab-stox"]


def test_each_sequence_of_a_stream_has_handed_out_its_own() -> None:
    request = request_for(n=2, stop=["zz"], output_kind=RequestOutputKind.DELTA)
    processor, parent = begun(request)
    give(parent, b"a")
    child = parent.fork(1)
    shown = [texts(processor, request)]
    for one, other in ((b"b", b""), (b"cz", b"d"), (b"e", b"fz")):
        give(parent, one)
        give(child, other)
        processor.take(parent)
        processor.take(child)
        shown.append(texts(processor, request))
    for sequence in (parent, child):
        sequence.finish("length")
        processor.take(sequence)
    shown.append(texts(processor, request))
    assert shown == [["", ""], ["ab", "a"], ["c", "d"], ["ze", "f"], ["", "z"]]


def test_two_of_one_id_are_two() -> None:
    """A request may have failed, and its id be in use again before it is said."""
    old, new = request_for("same"), request_for("same")
    processor, failed = begun(old)
    processor.add(new)
    sequence = new.begin()
    give(failed, b"old")
    give(sequence, b"new")
    for one in (failed, sequence):
        processor.take(one)
    old.fail(Failure("broken", by_caller=False))
    failed.finish("error")
    processor.check_integrity([new], [old])
    output = processor.output(old, True)
    assert output is not None and output.finished and output.outputs[0].stop_reason == "broken"
    assert texts(processor, new) == ["new"]
    processor.check_integrity([new], [])


def test_nothing_is_kept_of_who_has_gone() -> None:
    ended, discarded = request_for("a"), request_for("b")
    processor, sequence = begun(ended)
    processor.add(discarded)
    processor.check_integrity([ended, discarded], [])
    with pytest.raises(AssertionError, match="its text is kept"):
        processor.check_integrity([ended], [])
    processor.discard(discarded)
    sequence.finish("length")
    assert processor.output(ended, True) is not None
    processor.check_integrity([], [])
    with pytest.raises(AssertionError, match="no text"):
        processor.check_integrity([ended], [])


def test_a_request_that_never_began_has_an_output() -> None:
    request = request_for()
    request.fail(Failure("no good", by_caller=True))
    request.begin().finish("error")
    output = OutputProcessor(TOKENIZER).output(request, True)
    assert output is not None and output.failure is not None and output.failure.by_caller
    assert [(one.text, one.finish_reason, one.stop_reason) for one in output.outputs] == [("", "error", "no good")]


def test_a_search_shows_nothing_before_its_end() -> None:
    request = request_for()
    request.beam = BeamGroup(BeamSearchParams(beam_width=2, max_tokens=4), 4, frozenset())
    processor, sequence = begun(request)
    assert processor.output(request, request.finished) is None
    sequence.finish("stop")
    output = processor.output(request, request.finished)
    assert isinstance(output, BeamSearchOutput) and output.sequences == [] and output.error is None
    processor.check_integrity([], [])
