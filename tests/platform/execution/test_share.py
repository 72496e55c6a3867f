"""How much of a machine's memory one of a model's processes takes for blocks.

`_count_blocks` is private: whole processes would each see this machine's real memory.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quire import LLM, huge_pages
from quire.config import CacheConfig, EngineConfig
from quire.layers.stages import Stage
from quire.platform.execution import worker as workers
from quire.platform.execution.worker import Share, _count_blocks

AVAILABLE = 8 << 20


@pytest.mark.parametrize(
    ("cache", "fits"), [(CacheConfig(), [4, 2, 1]), (CacheConfig(memory_bytes=1 << 20), [1, 1, 1])]
)
def test_processes_of_a_machine_share_what_it_has(
    cache: CacheConfig, fits: list[int], tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four stages on one, two and four machines. A size that is given is of all, wherever they are."""
    llm = LLM(str(tiny_path), skip_tokenizer_init=True)
    model = cast(Any, llm.llm_engine.executor).worker.model
    config = EngineConfig(cache=cache)
    monkeypatch.setattr(huge_pages, "available_bytes", lambda device: AVAILABLE)
    pipe: Any = SimpleNamespace(least=lambda number: number)
    taken = []
    for sharers in (1, 2, 4):
        share = Share(stage=Stage(1, 4, pipe), sharers=sharers)
        taken.append(_count_blocks(config, model, model.kv_spec, 10**6, share)[-1])
    least = taken[-1]
    assert least > 0
    assert taken == pytest.approx([times * least for times in fits], rel=0.1)


def test_processes_of_a_model_swap_as_many_blocks(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them the least that one can, and together no more than the settings say."""
    model = cast(Any, LLM(str(tiny_path), skip_tokenizer_init=True).llm_engine.executor).worker.model
    monkeypatch.setattr(workers, "count_swap_blocks", lambda cache, size, device: 40)
    asked: list[int] = []
    pipe: Any = SimpleNamespace(least=lambda number: asked.append(number) or (7 if number == 10 else number))
    config = EngineConfig(cache=CacheConfig(num_blocks=5))
    assert _count_blocks(config, model, model.kv_spec, 100, Share(stage=Stage(1, 4, pipe)))[1] == 7
    assert asked[-1] == 10


def test_processes_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool may take of 80 GiB, of which 20 are taken, for one process and each of two; steps take 3."""
    gib = 1 << 30
    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    monkeypatch.setattr(workers, "step_bytes", lambda *given: 3 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 80 * gib))
    for sharers in (1, 2):
        pool = workers._pool_share(EngineConfig(), model, 100, 60 * gib // sharers, Share(sharers=sharers))
        assert pool == (72 - 20) * gib // sharers - 6 * gib - workers.SPLIT_BYTES
