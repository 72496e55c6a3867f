"""The emulator of CUDA finds the faults that it says it finds (csrc/cuda/emulator/emulator.h)."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import emulated

THREADS = 128
FROM = torch.arange(1, 2 * THREADS + 1, dtype=torch.float32)[:THREADS].clone()
_PLACES = torch.arange(THREADS)
# What each kernel writes where it is right.
RIGHT = {
    "barrier": FROM[(_PLACES + 32) % THREADS],
    "warp_barrier": FROM[_PLACES ^ 1],
    "wait": FROM,
    "wait_for_younger": FROM,
    "commit": FROM,
    "reuse": FROM,
    "divergence": FROM,
    "half_a_warp": FROM,
    "uninitialised": FROM,
    "past_the_end": FROM,
}


@pytest.fixture(scope="module")
def path() -> Path:
    sources = [emulated.SOURCES / "emulator" / "emulator.cpp", Path(__file__).with_name("emulator_check.cpp")]
    return emulated.build(sources, "emulator_check")


@pytest.fixture
def library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in RIGHT:
        getattr(library, f"check_{name}").restype = ctypes.c_char_p
    library.check_launch.restype = ctypes.c_bool
    return library


def run(library: ctypes.CDLL, name: str, right: bool) -> tuple[torch.Tensor, str | None]:
    """What the kernel's two blocks write, and what was thrown."""
    out, source = torch.full((2, THREADS), -1.0), FROM.clone()
    assert not source.data_ptr() % 16
    message = getattr(library, f"check_{name}")(
        ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_bool(right)
    )
    return out, None if message is None else message.decode()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_right_in_any_order(library: ctypes.CDLL, order: int, name: str) -> None:
    out, message = run(library, name, True)
    assert message is None and torch.equal(out, RIGHT[name].expand(2, -1))


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in ("divergence", "half_a_warp", "past_the_end")])
def test_what_lacks_a_barrier_or_a_wait_is_wrong_in_some_order(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wrong = []
    for seed in range(4):
        monkeypatch.setenv("QUIRE_EMULATOR_SEED", str(seed))
        out, message = run(library, name, False)
        wrong.append(message is not None or not torch.equal(out, RIGHT[name].expand(2, -1)))
    assert any(wrong)


def test_shared_memory_starts_as_nan_in_each_block(library: ctypes.CDLL, order: int) -> None:
    assert run(library, "uninitialised", False)[0].isnan().all()


@pytest.mark.parametrize("name", ["divergence", "half_a_warp"])
def test_a_barrier_that_some_never_reach_is_an_error(library: ctypes.CDLL, order: int, name: str) -> None:
    message = run(library, name, False)[1]
    assert message is not None and "never reach a barrier" in message
    assert run(library, name, True)[1] is None  # nothing is left behind


def test_what_lies_past_shared_memory_cannot_be_read(path: Path) -> None:
    code = (
        "import ctypes, sys; numbers = (ctypes.c_float * 256)();"
        "ctypes.CDLL(sys.argv[1]).check_past_the_end(numbers, numbers, ctypes.c_bool(sys.argv[2] == 'right'))"
    )
    for case, status in (("right", 0), ("wrong", -signal.SIGSEGV)):
        assert subprocess.run([sys.executable, "-c", code, str(path), case]).returncode == status


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_ldmatrix", [False, True])
def test_products_of_tiles(library: ctypes.CDLL, dtype: torch.dtype, by_ldmatrix: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-9, 10, (16, 16), generator=generator).to(dtype) for _ in range(2))
    c = torch.zeros(16, 16)
    library.check_mma(
        *(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)), ctypes.c_bool(dtype is torch.bfloat16),
        ctypes.c_bool(by_ldmatrix),
    )  # fmt: skip
    assert torch.equal(c, 1 + a.float() @ b.float())


@pytest.mark.parametrize(
    ("rows", "threads", "shared", "taken"),
    [(1, 32, 0, True), (1, 1024, 227 * 1024, True), (65_535, 32, 0, True), (0, 32, 0, True), (65_536, 32, 0, False),
     (1, 1056, 0, False), (1, 48, 0, False), (1, 32, 227 * 1024 + 1, False)],
)  # fmt: skip
def test_a_launch_that_a_gpu_refuses_is_refused(
    library: ctypes.CDLL, rows: int, threads: int, shared: int, taken: bool
) -> None:
    assert library.check_launch(rows, threads, shared) is taken
