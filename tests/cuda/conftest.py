"""Tests of the GPU's kernels: in their emulation, and with `-m gpu` on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels import binding
from tests.cuda import emulated, on_gpu


@pytest.fixture(scope="session", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Any:
    """`quire.kernels.cuda`, over the emulation or on a GPU."""
    return emulated.load() if request.param == "emulated" else on_gpu.load()


@pytest.fixture(scope="session")
def emulated_cuda() -> ModuleType:
    """`quire.kernels.cuda`, over the emulation alone."""
    return emulated.load()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[0, 3], ids=["late", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Warps and blocks forwards with asynchronous copies as late as may be, or backwards with copies at once."""
    monkeypatch.setenv("QUIRE_EMULATOR_SEED", str(request.param))
    return request.param


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results start as NaN, so that an element that no kernel wrote shows."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, device=device)

    monkeypatch.setattr(binding, "_empty", empty)
