"""What tests of adapters that come and go share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire import LLM
from tests.lora.adapter_files import prompt

NAMES = [f"a{number}" for number in range(8)]
PROMPT = prompt(5, 20)

Solo = Callable[..., list[int]]


def load(llm: LLM, folders: dict[str, Path], names: Sequence[str] = NAMES, **more: Any) -> None:
    for name in names:
        llm.load_lora_adapter(name, str(folders[name]), **more)


def tiers(llm: LLM) -> dict[str, str]:
    return {info.name: info.tier for info in llm.list_lora_adapters()}


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.001)
