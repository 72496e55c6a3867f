"""What benchmarks are run with, and the fixtures of tests/server/fixtures.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.fixtures import *  # noqa: F403

Call = Callable[..., None]

TINY = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=15000, max_position_embeddings=1024, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose vocabulary is large enough for the benchmarks' random prompts."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a module's `main` with these arguments; an exit code of 1, of a target that is missed, is no failure."""

    def run(module: ModuleType, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        try:
            module.main()
        except SystemExit as end:
            assert end.code in (None, 0, 1, False, True), end.code

    return run
