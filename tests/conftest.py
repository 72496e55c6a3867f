"""What several folders of tests share."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from tests.products import mark_products

# Hypothesis draws the same examples in every run and gives each its time: no change is refused for what chance brings.
# `--hypothesis-profile default` draws new ones.
with suppress(ImportError):  # tests of a GPU need none
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("same")

# The tests are of the CPU's kernels, also where there is a GPU; those of the GPU say so (`make test-gpu`).
os.environ.setdefault("QUIRE_DEVICE", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the GPU's kernels in their emulation run first: a process has these or the ones for a GPU.

    It comes after the hooks of the folders within, which mark some, and before pytest's own, which looks at marks.
    """
    items.sort(key=lambda item: item.get_closest_marker("emulated") is None)
    mark_products(items)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tests' models are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws from torch's generator does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of large models are, where the processor multiplies by packed ones."""
    monkeypatch.setattr("quire.models.packing.LEAST", 0)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that runs in this process sets up its loggers."""
    loggers = [logging.getLogger(name) for name in ("quire", "asyncio")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def foreground() -> Iterator[None]:
    """SIGINT as in a foreground job, here and in processes started here: a background job of a script ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
