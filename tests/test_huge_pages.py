"""Memory that is freed is kept for what comes next."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from quire import huge_pages

# Five blocks of 6 MB at a time, as a step's tensors, all freed at its end: pages that come anew in twenty such steps.
FAULTS = """
import resource
import torch
from quire import huge_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.empty(6 << 20, dtype=torch.uint8).fill_(1) for _ in range(5)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

as_it_was = faults()
huge_pages.keep_freed()
faults()
print(as_it_was, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they please")
def test_the_pages_of_a_steps_tensors_are_kept() -> None:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=settings, capture_output=True, text=True, check=True)
    as_it_was, kept = map(int, done.stdout.split())
    assert as_it_was > 100  # of 4 KB, 150,000; with huge pages, hundreds
    assert kept < as_it_was / 10


def test_whose_memory_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for all processes of a machine; a container with a limit has its own."""
    script = "from quire import huge_pages; print(huge_pages.owner())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == huge_pages.owner()
    limits = {"memory.max": ""}
    monkeypatch.setattr(huge_pages, "_container", limits.__getitem__)
    shared = huge_pages.owner()
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert huge_pages.owner() == shared
    limits["memory.max"] = "1000000"
    assert huge_pages.owner() not in ("", shared)
