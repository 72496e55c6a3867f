"""Threads: torch's own are used, their number changes nothing, and Python threads may call at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_helpers import randn, same_bits

native = pytest.importorskip("quire.kernels.native")

# Large enough that each kernel opens a parallel region.
X = randn(600, 300, dtype=torch.bfloat16)
WEIGHT = randn(500, 300, dtype=torch.bfloat16, seed=1)
GAIN = randn(300, dtype=torch.bfloat16, seed=2)


def all_kernels() -> list[torch.Tensor]:
    query, key = X.view(600, 5, 60).clone(), X[:, :60].reshape(600, 1, 60).clone()
    native.rotary(query, key, torch.arange(600), randn(600, 60, dtype=torch.float32, seed=3))
    pool = torch.zeros(40, 1, 16, 60, dtype=torch.bfloat16)
    values = pool.clone()
    native.write_kv(key, key, pool, values, torch.arange(600))
    table, starts = torch.arange(40, dtype=torch.int32).view(1, 40), torch.tensor([0, 600], dtype=torch.int32)
    attended = native.paged_attention(query, pool, values, table, starts, starts[1:], 0.1)
    return [
        native.linear(X, [WEIGHT, WEIGHT], [None, None]),
        native.rms_norm(X, GAIN, 1e-5),
        native.layer_norm(X, GAIN, GAIN, 1e-5),
        native.activation(X, "silu"),
        native.activation_and_mul(X, "gelu"),
        query, key, pool, values, attended,
    ]  # fmt: skip


@pytest.fixture
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("own_threads", [False, True])
def test_number_of_threads_changes_no_bit(own_threads: bool, restore_threads: None) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, test_threads as t\n"
        "from quire.kernels import native as n\n"
        "if sys.argv[2] == 'True': n._C.use_openmp(0)\n"
        "assert n.thread_pool() == ('own threads' if sys.argv[2] == 'True' else \"torch's OpenMP\")\n"
        "results = []\n"
        "for threads in (1, 2, 3, 8, 1):\n"
        "    torch.set_num_threads(threads)\n"
        "    assert n.num_threads() == threads\n"
        "    results.append(t.all_kernels())\n"
        "for other in results[1:]:\n"
        "    assert all(t.same_bits(a, b) for a, b in zip(results[0], other, strict=True))\n"
        "print('same')\n"
    )
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", script, here, str(own_threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr


def test_threads_are_torchs() -> None:
    assert native.num_threads() == torch.get_num_threads()
    if "libgomp" in Path("/proc/self/maps").read_text():
        assert native.thread_pool() == "torch's OpenMP"


def test_calls_from_several_threads_at_once() -> None:
    expected = all_kernels()

    def same_each_time(_: int) -> bool:
        return all(same_bits(a, b) for _ in range(3) for a, b in zip(all_kernels(), expected, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same_each_time, range(8)))


@pytest.mark.parametrize("name", ["portable", "sse9"])
def test_quire_isa(name: str) -> None:
    code = "from quire.kernels import native; print(native.isa())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "QUIRE_ISA": name}
    )
    if name == "sse9":
        assert "unknown instruction set 'sse9'" in done.stderr
    else:
        assert done.stdout == name + "\n", done.stderr
