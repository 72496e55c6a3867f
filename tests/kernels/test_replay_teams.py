"""The calls of a replay share one team of threads, which changes no bit and ends with the replay."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernel_helpers import randn, same_bits

native = pytest.importorskip("quire.kernels.native")
recording = pytest.importorskip("quire.kernels.recording")

# Large enough that each kernel opens a parallel region.
X = randn(600, 300, dtype=torch.bfloat16)
WIDE, NARROW = randn(500, 300, dtype=torch.bfloat16, seed=1), randn(300, 500, dtype=torch.bfloat16, seed=2)
GAIN = randn(500, dtype=torch.bfloat16, seed=3)


@pytest.fixture(autouse=True)
def poison() -> None:
    """Not here: it makes new tensors in another way than the kernels do, which a recording refuses."""


@pytest.fixture
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def recorded(x: torch.Tensor, rows: torch.Tensor) -> Any:
    """Calls, several of which want a team, about rows of x."""

    def function() -> torch.Tensor:
        y = native.rms_norm(native.linear(native.embedding(rows, x), [WIDE], [None]), GAIN, 1e-5)
        return native.linear(native.activation(y, "silu"), [NARROW], [None])

    return recording.record(function, recording.Workspace())


@torch.inference_mode()
def test_the_team_of_a_replay_changes_no_bit(restore_threads: None) -> None:
    rows = torch.arange(600)
    torch.set_num_threads(2)
    replayed = recorded(X, rows)
    expected = replayed.results.clone()
    for threads in (1, 2, 3, 8, 2):
        torch.set_num_threads(threads)
        for _ in range(5):
            replayed.results.fill_(torch.nan)
            replayed.replay()
            assert same_bits(replayed.results, expected)


@torch.inference_mode()
def test_an_error_ends_the_team_of_a_replay(restore_threads: None) -> None:
    rows = torch.arange(600)
    torch.set_num_threads(2)
    replayed = recorded(X, rows)
    expected = replayed.results.clone()
    for _ in range(3):
        rows[7] = 600
        with pytest.raises(IndexError):
            replayed.replay()
        rows[7] = 7
        replayed.replay()
        assert same_bits(replayed.results, expected)


@torch.inference_mode()
def test_replays_in_several_threads_at_once() -> None:
    rows = torch.arange(600)
    expected = recorded(X, rows).results.clone()

    @torch.inference_mode()
    def same_each_time(_: int) -> bool:
        replayed = recorded(X, rows)
        same = []
        for _ in range(5):
            replayed.results.fill_(torch.nan)
            replayed.replay()
            same.append(same_bits(replayed.results, expected))
        return all(same)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same_each_time, range(8)))
