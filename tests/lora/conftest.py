"""Worlds of `peft_world`, each made once; a Llama for the tests without an oracle, and engines of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.models import quantization
from tests.lora import adapter_files as files
from tests.lora.adapter_faults import PROMPTS
from tests.lora.adapter_files import greedy, no_adapters, open_llm, tokens
from tests.lora.adapter_life import NAMES, PROMPT, Solo
from tests.lora.peft_world import World, text_world, video_world, vision_world
from tests.lora.quantized_world import METHOD, Kinds, plan_of, quantized_world
from tests.multimodal.tiny_vision import FAMILIES
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
            make = vision_world if architecture in FAMILIES else text_world
            made[key] = make(folder, architecture, variant, **settings)
        return made[key]

    yield get
    for world in made.values():
        world.llm.llm_engine.check_integrity()


@pytest.fixture(scope="session")
def quantized_method() -> Iterator[None]:
    """Checkpoints of rows of bytes can be read (`quantized_world`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "METHODS", {**quantization.METHODS, METHOD: plan_of})
        yield


@pytest.fixture(scope="session")
def quantized_worlds(tmp_path_factory: pytest.TempPathFactory, quantized_method: None) -> Iterator[Worlds]:
    """(architecture, kinds of rows, variant, settings of its configuration) -> the world of that model."""
    made: dict[str, World] = {}

    def get(architecture: str, kinds: Kinds, variant: str = "", **settings: Any) -> World:
        key = repr((architecture, kinds, variant, settings))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{architecture}-quantized")
            made[key] = quantized_world(folder, architecture, kinds, variant, **settings)
        return made[key]

    yield get
    for world in made.values():
        world.llm.llm_engine.check_integrity()


@pytest.fixture(scope="module")
def video_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """(architecture, variant) -> the world of that model, with videos in its prompts."""
    made: dict[tuple[str, str], World] = {}

    def get(architecture: str, variant: str) -> World:
        key = architecture, variant
        if key not in made:
            made[key] = video_world(tmp_path_factory.mktemp(f"{architecture}-videos"), architecture, variant)
        return made[key]

    yield get
    for world in made.values():
        world.llm.llm_engine.check_integrity()


# -- adapters that come and go: adapter_life.py ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight plain adapters of one size; not to be written to."""
    base = tmp_path_factory.mktemp("adapters")
    return {name: files.plain(base / name, seed=number) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def calm(path: Path) -> LLM:
    return open_llm(path, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def size(calm: LLM, folders: dict[str, Path]) -> int:
    """Of each of the eight in memory."""
    sizes = {calm.load_lora_adapter("size", str(folders[name])).bytes * (calm.unload_lora_adapter("size") > 0)
             for name in NAMES}  # fmt: skip
    (found,) = sizes
    return found


@pytest.fixture(scope="module")
def solo(calm: LLM) -> Solo:
    """(folder of an adapter or None, prompt, number of tokens) -> the tokens of a request that is alone."""

    @cache
    def answer(folder: Path | None, ids: tuple[int, ...], count: int) -> list[int]:
        if folder is None:
            return tokens(calm, [list(ids)], None, greedy(count))[0]
        calm.load_lora_adapter("solo", str(folder))
        found = tokens(calm, [list(ids)], "solo", greedy(count))[0]
        calm.unload_lora_adapter("solo")
        return found

    return lambda folder, ids=PROMPT, count=6: answer(folder, tuple(ids), count)


# -- adapters that are refused: adapter_faults.py ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return open_llm(path)


@pytest.fixture(scope="module")
def before(llm: LLM) -> list[list[int]]:
    return tokens(llm, PROMPTS)


@pytest.fixture
def unharmed(llm: LLM, before: list[list[int]]) -> Iterator[None]:
    """After each test the engine has nothing of the adapter, and answers as it did."""
    yield
    no_adapters(llm)
    assert tokens(llm, PROMPTS[:1]) == before[:1]
