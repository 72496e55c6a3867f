"""Kernel tests run on every back end that is there, with results that start as NaN.

`kernels` is the back end under test, a module of `quire.kernels`: the reference, the CPU's with each instruction set of
this machine, the GPU's in its emulation (marker `emulated`), the GPU's (marker `gpu`). What not all have or promise
takes `cpu` or `cuda` instead; what is too much for the emulation, `quick`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels import binding
from tests.kernels import emulated
from tests.kernels.back_ends import CUDA, OWN, back_end


@pytest.fixture(params=["reference", *OWN, *CUDA])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every back end."""
    with back_end(request.param) as module:
        yield module


@pytest.fixture(params=["reference", *OWN, CUDA[1]])
def quick(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every back end but the emulation, which would take minutes for sizes that are a second's work for the others."""
    with back_end(request.param) as module:
        yield module


@pytest.fixture(params=["reference", *OWN])
def on_cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every back end of a CPU: for what a GPU refuses."""
    with back_end(request.param) as module:
        yield module


@pytest.fixture(params=OWN)
def cpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The CPU's compiled kernels, with each instruction set."""
    with back_end(request.param) as module:
        yield module


@pytest.fixture(params=CUDA)
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The GPU's kernels, over the emulation or on a GPU."""
    with back_end(request.param) as module:
        yield module


@pytest.fixture(scope="session")
def emulated_cuda() -> ModuleType:
    """The GPU's kernels over the emulation alone."""
    return emulated.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "emulated_cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.emulated)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[0, 3], ids=["late", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Emulated warps and blocks forwards with asynchronous copies as late as can be, or backwards with them at once."""
    monkeypatch.setenv("QUIRE_EMULATOR_SEED", str(request.param))
    return request.param


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results start as NaN, so that an element that no kernel wrote shows."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, device=device)

    monkeypatch.setattr(binding, "_empty", empty)
