"""One recording serves steps of any size: the bits of the calls themselves; what it cannot hold is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_helpers import randn, same_bits

native = pytest.importorskip("quire.kernels.native")
recording = pytest.importorskip("quire.kernels.recording")

F32 = torch.float32
TOKENS, SEQUENCES = 307, 7  # most of a step
BLOCKS, SIZE = 80, 4  # of each sequence, and slots of each
HEADS, KEY_HEADS, DIM = 4, 2, 8
WIDTH = HEADS * DIM


@pytest.fixture(autouse=True)
def poison() -> None:
    """Not here: it makes new tensors in another way than the kernels do, which a recording refuses."""


@dataclass(frozen=True)
class Inputs:
    """Of a step: ids, positions, slots [T]; ends [S + 1]; lengths [S]; table [S, BLOCKS]."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor

    @classmethod
    def of(cls, *lengths: int) -> Inputs:
        """Of sequences of so many tokens."""
        generator = torch.Generator().manual_seed(sum(lengths))
        count = torch.tensor(lengths, dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), count.long())
        return cls(
            torch.randint(0, 50, (sum(lengths),), generator=generator),
            positions,
            owner * BLOCKS * SIZE + positions,
            torch.cat([torch.zeros(1, dtype=torch.int32), count.cumsum(0).to(torch.int32)]),
            count,
            torch.arange(len(lengths) * BLOCKS, dtype=torch.int32).view(-1, BLOCKS),
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.ids, self.positions, self.slots, self.ends, self.lengths, self.table]

    def take(self, other: Inputs) -> None:
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own[tuple(map(slice, new.shape))] = new


class Step:
    """Calls most kernels, as a model's layer does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.table, self.norm = randn(50, WIDTH, dtype=dtype), randn(WIDTH, dtype=dtype, seed=1)
        self.qkv = randn((HEADS + 2 * KEY_HEADS) * DIM, WIDTH, dtype=dtype, seed=2)
        self.up, self.down = randn(96, WIDTH, dtype=dtype, seed=3), randn(WIDTH, 48, dtype=dtype, seed=4)
        self.turns = randn(TOKENS, DIM, dtype=F32, seed=5)
        self.keys, self.values = torch.zeros(2, SEQUENCES * BLOCKS, KEY_HEADS, SIZE, DIM, dtype=dtype)

    def __call__(self, given: Inputs) -> torch.Tensor:
        residual = native.embedding(given.ids, self.table)
        parts = native.linear(native.rms_norm(residual, self.norm, 1e-6), [self.qkv], [None])
        query, key, value = parts.view(len(parts), -1, DIM).split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        native.rotary(query, key, given.positions, self.turns)
        native.write_kv(key, value, self.keys, self.values, given.slots)
        mixed = native.paged_attention(query, self.keys, self.values, given.table, given.ends, given.lengths, DIM**-0.5)
        x = native.layer_norm(mixed.view(len(mixed), WIDTH), self.norm, None, 1e-6, residual)
        x = native.activation_and_mul(native.linear(x, [self.up], [None]), "silu")
        return native.linear(x, [self.down], [None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_replay_for_fewer_is_the_calls_themselves(dtype: torch.dtype) -> None:
    step, own = Step(dtype), Inputs.of(TOKENS - SEQUENCES + 1, *[1] * (SEQUENCES - 1))
    made = recording.record_sizable(lambda: step(own), recording.Workspace(), TOKENS, SEQUENCES)
    assert not step.keys.any(), "something was computed while it was recorded"
    for lengths in ((2,), (1, 1), (5, 1, 30), (TOKENS,), (17,) * SEQUENCES, (290, 1, 1, 1, 1, 1, 12), (3, 2)):
        given = Inputs.of(*lengths)
        step.keys.zero_()
        own.take(given)
        made.replay(sum(lengths), len(lengths))
        found, keys = made.results[: sum(lengths)].clone(), step.keys.clone()
        step.keys.zero_()
        assert same_bits(found, step(given))
        assert same_bits(keys, step.keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_some_rows_alone(dtype: torch.dtype) -> None:
    """Whose number is another than that of the tokens, from somewhere on."""
    step, own, chosen = Step(dtype), Inputs.of(TOKENS), torch.zeros(41, dtype=torch.int64)

    def function(given: Inputs, rows: torch.Tensor) -> torch.Tensor:
        x = native.activation_and_mul(native.linear(native.embedding(rows, step(given)), [step.up], [None]), "gelu")
        return native.linear(x, [step.down], [None])

    with pytest.raises(recording.NotRecordable, match="rows each"):
        recording.record_sizable(lambda: function(own, chosen), recording.Workspace(), TOKENS, 1)
    made = recording.record_sizable(lambda: function(own, chosen), recording.Workspace(), TOKENS, 1, 41)
    for tokens, rows in ((2, [1]), (300, [299]), (41, [5, 3, 40]), (200, list(range(0, 200, 5))), (TOKENS, [0] * 41)):
        given, wanted = Inputs.of(tokens), torch.tensor(rows)
        own.take(given)
        chosen[: len(rows)] = wanted
        made.replay(tokens, 1, len(rows))
        assert same_bits(made.results[: len(rows)], function(given, wanted))
    for size in ((20, 1, 0), (20, 1, 42), (20, 1)):
        with pytest.raises(ValueError, match="more of a step than was recorded"):
            made.replay(*size)


@torch.inference_mode()
def test_more_than_was_recorded_is_refused() -> None:
    step, own = Step(F32), Inputs.of(20, 3)
    made = recording.record_sizable(lambda: step(own), recording.Workspace(), 23, 2)
    for size in ((24, 2), (23, 3), (0, 1), (2, 0), (-1, 1), (20, 2, 1)):
        with pytest.raises(ValueError, match="more of a step than was recorded"):
            made.replay(*size)


@torch.inference_mode()
def test_a_replay_checks_what_it_reads() -> None:
    step, own = Step(F32), Inputs.of(20, 3)
    made = recording.record_sizable(lambda: step(own), recording.Workspace(), 23, 2)
    own.take(Inputs.of(10))
    own.ids[10] = 50
    made.replay(10, 1)  # nobody reads the eleventh
    own.take(Inputs.of(12))
    own.ids[10] = 50
    with pytest.raises(IndexError, match="ids"):
        made.replay(12, 1)
    own.take(Inputs.of(12))
    with pytest.raises(ValueError, match="query_start"):
        made.replay(11, 1)


@torch.inference_mode()
def test_weights_lie_wherever_they_lie() -> None:
    """The places and strides of what is not made of the step have nothing to do with its size."""
    step, own, most = Step(F32), Inputs.of(20, 3), 23
    norm = randn(most + 1, WIDTH, dtype=F32)[most:]

    def function(given: Inputs) -> torch.Tensor:
        x = native.embedding(given.ids, step.table)
        return native.rms_norm(x, norm.view(2, -1).flatten(), 1e-6)

    made = recording.record_sizable(lambda: function(own), recording.Workspace(), most, 2)
    own.take(Inputs.of(7))
    made.replay(7, 1)
    assert same_bits(made.results[:7], function(Inputs.of(7)))


def other_rows(step: Step, given: Inputs) -> Any:
    return native.linear(native.embedding(given.ids, step.table)[:3], [step.up], [None])


def other_sequences(step: Step, given: Inputs) -> Any:
    query = native.embedding(given.ids, step.table).view(-1, HEADS, DIM)
    few = replace(given, ends=given.ends[:2], lengths=given.lengths[:1], table=given.table[:1])
    return native.paged_attention(query, step.keys, step.values, few.table, few.ends, few.lengths, 1.0)


def whatever_the_size(step: Step, given: Inputs) -> Any:
    return native.likeliest(native.embedding(given.ids, step.table))


def of_torch(step: Step, given: Inputs) -> Any:
    return native.embedding(given.ids, step.table) + 1


def a_number(step: Step, given: Inputs) -> Any:
    return native.embedding(given.ids, step.table)[: int(given.lengths[0].item())]


def by_head(step: Step, given: Inputs) -> Any:
    x = native.embedding(given.ids, step.table)
    return native.embedding(given.ids, x.view(-1, len(given.ids), DIM).flatten(0, 1))


def second_half(step: Step, given: Inputs) -> Any:
    both = torch.empty((2 * len(given.ids), WIDTH), dtype=F32)
    return native.rms_norm(both[len(given.ids) :], step.norm, 1e-6)


@pytest.mark.parametrize(
    "function", [by_head, second_half, other_rows, other_sequences, whatever_the_size, of_torch, a_number]
)
@torch.inference_mode()
def test_what_it_cannot_hold_is_not_recorded(function: Any) -> None:
    step, own = Step(F32), Inputs.of(20, 3)
    with pytest.raises(recording.NotRecordable):
        recording.record_sizable(lambda: function(step, own), recording.Workspace(), 23, 2)
    native.likeliest(randn(3, 4, dtype=F32))  # and recording has ended
    assert native.embedding(own.ids, step.table).any()


@torch.inference_mode()
def test_segments_of_adapters_are_of_certain_tokens() -> None:
    from quire.kernels.adapters import LoraSegments

    step, own = Step(F32), Inputs.of(20, 3)
    segments = LoraSegments.of([(0, 20, 0, 1.0)], 23, torch.device("cpu"))

    def function() -> torch.Tensor:
        x = native.embedding(own.ids, step.table)
        return native.linear(x, [step.up], [None], None, (None,), segments)

    with pytest.raises(recording.NotRecordable, match="rows each"):
        recording.record_sizable(function, recording.Workspace(), 23, 2)
