"""Kernel tests run on each instruction set of this machine, with results that start as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels import binding

try:
    from quire.kernels import native
except ImportError:
    native = None  # type: ignore[assignment]


@pytest.fixture(params=native.available_isas() if native else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use during the test."""
    best = native.isa()
    native._C.set_isa(request.param)
    yield request.param
    native._C.set_isa(best)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results start as NaN, so that an element that no kernel wrote shows."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(binding, "_empty", empty)
