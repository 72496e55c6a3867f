"""Replays compute what the function computes, and nothing that a replay would leave out is recorded."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from kernel_helpers import randn, same_bits

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
