"""Worlds of `peft_world`, each made once; a Llama for the tests without an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lora.peft_world import World, text_world, vision_world
from tests.platform.conftest import make_llama

Worlds = Callable[..., World]


@pytest.fixture(scope="module", autouse=True)
def with_one_thread(one_thread: None) -> None:
    """In all of this folder."""


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
