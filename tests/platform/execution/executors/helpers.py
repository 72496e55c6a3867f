"""What the tests of this folder share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.platform.execution import sharded
from quire.platform.execution.remote import RemoteExecutor
from quire.platform.execution.sharded import ShardedExecutor

SMALL = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40, "debug": True, "enable_prompt_embeds": True}
# Settings under which steps are computed in other processes; "messages" on a machine that cannot share memory.
ELSEWHERE = {
    "executor": {"executor": "process"},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "messages": {"tensor_parallel_size": 2},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2},
    "both": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ended(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


QUICK = ("executor", "tensor_parallel_size")
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in ELSEWHERE]


@contextmanager
def elsewhere(kind: str) -> Iterator[dict[str, Any]]:
    """Settings of `ELSEWHERE`, and what they want while an engine is made."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "messages":
            patch.setattr(sharded, "can_share_memory", lambda: False)
        yield ELSEWHERE[kind]


def processes(llm: LLM) -> list[RemoteExecutor]:
    executor = llm.llm_engine.executor
    return executor._workers if isinstance(executor, ShardedExecutor) else [executor]  # nobody else needs them


def pids_of(llm: LLM) -> list[int]:
    return [one.link.process.pid for one in processes(llm)]
