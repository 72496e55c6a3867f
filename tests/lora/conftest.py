"""Worlds of `peft_world`, each made once; a Llama for the tests without an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.lora.peft_world import World, text_world, vision_world
from tests.platform.conftest import make_llama

Worlds = Callable[..., World]


@pytest.fixture(scope="module", autouse=True)  # no wider: other folders' tests keep all threads
def one_thread() -> Iterator[None]:
    """The models are tiny: waking threads for them takes longer than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def worlds(tmp_path_factory) -> Iterator[Worlds]:
    """(architecture, variant, settings of its configuration) -> the world of that model."""
    made: dict[tuple, World] = {}

    def get(architecture: str, variant: str, **settings) -> World:
        key = architecture, variant, *settings.items()
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{architecture}-{variant}")
            is_text = architecture.endswith("ForCausalLM") or architecture.startswith("GPT2")
            make = text_world if is_text else vision_world
            made[key] = make(folder, architecture, variant, **settings)
        return made[key]

    yield get
    for world in made.values():
        world.llm.llm_engine.check_integrity()
