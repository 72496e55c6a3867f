"""What the tests of this folder share."""

from __future__ import annotations

import os
import time
from pathlib import Path

from quire import LLM, SamplingParams

SMALL = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40, "debug": True, "enable_prompt_embeds": True}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ended(pid: int, seconds: float = 10.0) -> bool:
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


def pid_of(llm: LLM) -> int:
    return llm.llm_engine.executor._process.pid  # nobody else needs it
