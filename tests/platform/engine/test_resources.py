"""Start-up and memory, in a process of its own; benchmarks/startup.py measures the same on a model of any size."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire import huge_pages
from quire.errors import QuireError

SCRIPT = """
import resource, sys
from pathlib import Path
import torch, transformers
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_memory_bytes=64 << 20)
llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=8), use_tqdm=False)
weights = sum(p.stat().st_size for p in Path(sys.argv[1]).glob("*.safetensors"))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmRSS"].split()[0]) * 1024 - weights - (64 << 20))
"""


def test_memory_beside_weights_and_pool(tiny_path):
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tiny_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 600 << 20


def test_a_container_s_cached_files_are_available(monkeypatch):
    files = {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 1\nactive_file 300000\n"
             "inactive_file 200000\nfile 600000"}  # fmt: skip
    monkeypatch.setattr(huge_pages, "_container", lambda name: files[name])
    assert huge_pages.available_bytes() == 600_000
    monkeypatch.setattr(huge_pages, "_container", lambda name: "")
    assert huge_pages.available_bytes() > 1_000_000


def test_memory_that_the_system_does_not_give():
    with pytest.raises(QuireError, match=r"does not give .* bytes of memory .*lower"):
        huge_pages.allocate(1 << 62)
