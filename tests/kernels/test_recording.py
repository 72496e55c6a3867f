"""Replays compute what the function computes, and nothing that a replay would leave out is recorded."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from kernel_helpers import randn, same_bits

from quire.kernels.exchange import Columns
from tests.kernels.exchange_parties import by_messages, together

native = pytest.importorskip("quire.kernels.native")
recording = pytest.importorskip("quire.kernels.recording")

F32 = torch.float32


@pytest.fixture(autouse=True)
def poison() -> None:
    """Not here: it makes new tensors in another way than the kernels do, which a recording refuses."""


@pytest.fixture
def workspace():
    return recording.Workspace()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_replay_computes_anew(workspace, dtype: torch.dtype) -> None:
    table, weight, scale = randn(20, 32, dtype=dtype), randn(48, 32, dtype=dtype, seed=1), randn(24, dtype=dtype)
    ids = torch.tensor([3, 4, 19])

    def function() -> torch.Tensor:
        x = native.linear(native.embedding(ids, table), [weight], [None])
        return native.rms_norm(native.activation_and_mul(x, "silu"), scale, 1e-6)

    recorded = recording.record(function, workspace)
    assert len(recorded) == 4
    assert same_bits(recorded.results, function())
    ids.copy_(torch.tensor([7, 0, 3]))
    expected = function()
    assert not same_bits(recorded.results, expected)
    recorded.replay()
    assert same_bits(recorded.results, expected)


@torch.inference_mode()
def test_memory_is_taken_again_but_never_while_a_view_lives(workspace) -> None:
    weight, narrow, x = randn(64, 64, dtype=F32), randn(64, 32, seed=2, dtype=F32), randn(4, 64, seed=1, dtype=F32)
    addresses: list[int] = []

    def function() -> torch.Tensor:
        first = native.linear(x, [weight], [None])
        part = first.split(32, 1)[1]  # keeps the memory of `first`, which goes
        del first
        second = native.linear(x, [weight], [None])
        kept = native.linear(second, [weight], [None])
        addresses.extend([part.data_ptr() - 32 * 4, second.data_ptr(), kept.data_ptr()])
        del second
        third = native.linear(kept, [weight], [None])
        addresses.append(third.data_ptr())
        return native.linear(part, [narrow], [None])

    recording.record(function, workspace)
    first, second, kept, third = addresses
    assert len({first, second, kept}) == 3
    assert third == second


@torch.inference_mode()
def test_results_of_many_recordings_share_memory(workspace) -> None:
    weight = randn(64, 64, dtype=F32)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return native.linear(native.linear(x, [weight], [None]), [weight], [None])

    inputs = [randn(tokens, 64, seed=tokens, dtype=F32) for tokens in (7, 7, 300, 7000, 3)]
    made = [recording.record(partial(twice, x), workspace) for x in inputs]
    assert made[0].results.data_ptr() == made[1].results.data_ptr()
    for x, recorded in zip(inputs, made, strict=True):
        recorded.replay()
        assert same_bits(recorded.results, twice(x))


def swallowed(x: torch.Tensor) -> None:
    with contextlib.suppress(Exception):
        x.item()


def converted(x: torch.Tensor) -> None:
    try:
        x.add(1)
    except Exception as error:
        raise RuntimeError("out of a compiled function") from error


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("add", lambda x: x + 1),
        ("in place", lambda x: x.add_(1)),
        ("number", lambda x: x * x[0, 0].item()),
        ("zeros", lambda x: torch.zeros(3, 4)),
        ("list", lambda x: x.tolist()),
        ("numpy", lambda x: x.numpy()),
        ("constant", lambda x: torch.tensor([1.0])),
        ("constant of a list", lambda x: torch.as_tensor([1.0])),
        ("swallowed", swallowed),
        ("converted", converted),
        ("copying reshape", lambda x: x.t().reshape(-1)),
        ("copying contiguous", lambda x: x.t().contiguous()),
        ("index", lambda x: x[[0, 1]]),
        ("clone", lambda x: x.clone()),
        ("cast", lambda x: x.bfloat16()),
        ("product", lambda x: x @ x.t()),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_is_no_kernel_is_not_recorded(workspace, name: str, operation, inference: bool) -> None:
    x, weight = randn(3, 4, dtype=F32), randn(4, 4, dtype=F32)
    with torch.inference_mode(inference), torch.no_grad(), pytest.raises(recording.NotRecordable, match="no kernel"):
        recording.record(lambda: operation(native.linear(x, [weight], [None])), workspace)
    # and recording has ended
    before = recording.record(lambda: native.linear(x, [weight], [None]), workspace)
    native.linear(x, [weight], [None])
    assert len(before) == 1


@torch.inference_mode()
def test_an_error_ends_the_recording(workspace) -> None:
    x, weight = randn(3, 4, dtype=F32), randn(4, 4, dtype=F32)

    def function() -> None:
        native.linear(x, [weight], [None])
        raise KeyError("of the function's own")

    with pytest.raises(KeyError):
        recording.record(function, workspace)
    made = recording.record(lambda: native.linear(x, [weight], [None]), workspace)
    assert len(made) == 1


@torch.inference_mode()
def test_attention_with_all_options_is_computed_anew(workspace) -> None:
    keys, values = randn(9, 2, 4, 8, dtype=F32), randn(9, 2, 4, 12, dtype=F32, seed=1)[..., :6]
    query, block_table = randn(2, 4, 8, dtype=F32), torch.tensor([[0, 3, 2, 1], [8, 5, 7, 6]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([7, 12], dtype=torch.int32)
    slopes, sinks, scales = (randn(4, dtype=F32, seed=seed) for seed in (2, 3, 4))
    ends, slots = lengths.clone(), torch.tensor([0, 20])

    def function() -> torch.Tensor:
        native.write_kv(query[:, :2], None, keys, None, slots)
        return native.paged_attention(
            query, keys, values, block_table, starts, lengths, 0.3, 5, slopes, 2.0, sinks, scales, ends
        )

    recorded = recording.record(function, workspace)
    assert same_bits(recorded.results, function())
    for change in (slopes, sinks, scales, query, values):
        change += 0.5
        before = recorded.results.clone()
        recorded.replay()
        assert not same_bits(before, recorded.results) and same_bits(recorded.results, function())
    # the window moves on: what is behind it is not read any more
    lengths += 3
    ends.copy_(lengths)
    block_table[0, 0] = block_table[1, :2] = -1
    recorded.replay()
    assert same_bits(recorded.results, function())
    ends[1] += 1
    with pytest.raises(ValueError, match="visible_end"):
        recorded.replay()


@torch.inference_mode()
def test_replays_check_their_inputs(workspace) -> None:
    table, ids = randn(20, 32, dtype=F32), torch.tensor([3, 4])
    keys, values, slots = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), torch.tensor([1, 7])
    query, block_table = randn(2, 2, 8, dtype=F32), torch.tensor([[0], [1]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([2, 4], dtype=torch.int32)

    def function() -> torch.Tensor:
        native.embedding(ids, table)
        native.write_kv(query[:, :1], query[:, 1:], keys, values, slots)
        return native.paged_attention(query, keys, values, block_table, starts, lengths, 1.0)

    recorded = recording.record(function, workspace)
    for tensor, bad, error in [
        (ids, 20, IndexError),
        (ids, -1, IndexError),
        (slots, 8, IndexError),
        (block_table, 2, IndexError),
        (lengths, 9, ValueError),
    ]:
        good = tensor.clone()
        tensor.view(-1)[1] = bad
        with pytest.raises(error):
            recorded.replay()
        tensor.copy_(good)
    recorded.replay()


OPERATIONS = frozenset({
    "add", "sub", "mul", "div", "neg", "cat", "to", "_to_copy", "contiguous", "clone", "reshape", "index", "zeros",
    "index_add_", "softmax", "_softmax", "topk", "sum", "remainder", "arange", "slice", "mean", "detach_", "add_",
    "dropout", "masked_select", "rand_like", "item", "empty_like",
})  # fmt: skip


def between_kernels(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Kernels, and operations of torch's of every kind between them: copies, several results, in place, constants."""
    x = native.embedding(ids, table)
    y = native.linear(x, [weight], [None]).view(1, 3, 4, 16).transpose(1, 2)
    y = y * 2.0 + torch.cat((-y[..., 8:], y[..., :8]), -1)
    y = y.transpose(1, 2).contiguous().view(3, 64).to(torch.bfloat16).float()
    shares, chosen = torch.topk(torch.softmax(y, -1), 3)
    total = torch.zeros(3, 64)
    total.index_add_(0, torch.arange(3), y)
    y = native.linear(total + y[chosen[:, 0] % 3], [weight], [None])
    y = torch.dropout(y, 0.1, False)
    return native.linear(y * shares.sum(-1, keepdim=True) * torch.tensor(0.3), [weight], [None])


@torch.inference_mode()
def test_named_operations_of_torch_are_done_again(workspace) -> None:
    weight, table, ids = randn(64, 64, dtype=F32), randn(20, 64, dtype=F32, seed=1), torch.tensor([1, 2, 3])
    recorded = recording.record(lambda: between_kernels(ids, table, weight), workspace, OPERATIONS)
    for numbers in ([4, 5, 6], [19, 0, 0], [1, 2, 3]):
        ids.copy_(torch.tensor(numbers))
        expected = between_kernels(ids, table, weight)
        recorded.replay()
        assert same_bits(recorded.results, expected)


@torch.inference_mode()
def test_recordings_with_operations_share_memory(workspace) -> None:
    """What one recording's operations read, another's may have written: each writes all that it reads."""
    weight, table = randn(64, 64, dtype=F32), randn(20, 64, dtype=F32, seed=1)
    inputs = [torch.tensor([a, b, 3]) for a, b in ((1, 2), (7, 0), (5, 19))]
    made = [
        recording.record(partial(between_kernels, ids, table, weight), workspace, OPERATIONS) for ids in inputs
    ]  # fmt: skip
    for turn in range(2):
        for ids, recorded in zip(inputs, made, strict=True):
            recorded.replay()
            assert same_bits(recorded.results, between_kernels(ids, table, weight)), turn


@torch.inference_mode()
def test_operations_keep_no_memory(workspace) -> None:
    """Memory of a result that is gone is taken again, though an operation of the recording reads it."""
    x, weight = randn(512, 512, dtype=F32), randn(512, 512, dtype=F32, seed=1)

    def function() -> torch.Tensor:
        y = native.linear(x, [weight], [None])
        for _ in range(20):
            y = y + 1.0
        return y

    recorded = recording.record(function, workspace, OPERATIONS)
    assert sum(chunk.numel() for chunk in workspace._chunks) <= 4 * x.nbytes  # nothing public says it
    expected = function()
    x.add_(0)
    recorded.replay()
    assert same_bits(recorded.results, expected)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("not named", lambda x, own: x.exp()),
        ("what is not the step's own", lambda x, own: own.add_(1)),
        ("a shape of numbers", lambda x, own: x.masked_select(x > 0)),
        ("rows by a mask", lambda x, own: x[own > 0]),
        ("random numbers", lambda x, own: torch.rand_like(x)),
        ("dropout", lambda x, own: torch.dropout(x, 0.5, True)),
        ("a number", lambda x, own: x * x[0, 0].item()),
        ("a branch", lambda x, own: x + 1 if x[0, 0] > 0 else x),
        ("a constant of numbers", lambda x, own: x * torch.as_tensor(own.tolist()[0][0])),
        ("a constant of a tensor", lambda x, own: x * torch.tensor(own[0, 0])),
    ],
)
def test_what_cannot_be_done_again_is_not_recorded(workspace, name: str, operation) -> None:
    x, weight, own = randn(3, 4, dtype=F32), randn(4, 4, dtype=F32), randn(3, 4, dtype=F32)
    with torch.inference_mode(), pytest.raises(recording.NotRecordable, match="no kernel"):
        recording.record(lambda: operation(native.linear(x, [weight], [None]), own), workspace, OPERATIONS)


def test_columns_of_other_processes_between_kernels() -> None:
    """What a replay sends and gets is what is there then."""
    size, width = 3, 8
    (parties,) = by_messages(size)
    columns = Columns([[width] * size])
    weight = torch.ones(width * size)
    inputs = [torch.zeros(3, width) for _ in range(size)]

    def act(rank: int) -> list[torch.Tensor]:
        def step() -> torch.Tensor:
            own = native.rms_norm(inputs[rank], weight[:width], 0.0)
            return native.rms_norm(parties[rank].gather(own, columns), weight, 0.0)

        made = recording.record(step, recording.Workspace())
        found = []
        for turn in range(3):
            inputs[rank].copy_(torch.arange(24.0).view(3, 8) + 1 + 10 * rank + turn)
            made.replay()
            found.append(made.results.clone())
        return found

    expected = []
    for turn in range(3):
        rows = [torch.arange(24.0).view(3, 8) + 1 + 10 * rank + turn for rank in range(size)]
        own = [native.rms_norm(one, weight[:width], 0.0) for one in rows]
        expected.append(native.rms_norm(torch.cat(own, 1), weight, 0.0))
    for found in together(size, act):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
