"""Whole GGUF models with values that nobody would write: each is read, or refused with an error of quire's."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.gguf.config import config_of
from quire.checkpoint.gguf.file import GgufFile, open_gguf
from quire.checkpoint.gguf.folder import gguf_folder
from quire.checkpoint.gguf.tokenizer import ends_of, write_tokenizer
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.models.loader import load_structure
from tests.checkpoint import gguf_models
from tests.checkpoint.test_gguf_tokenizers import PIECES, WORDS
from tests.models import tiny

MODELS = {
    "llama": ("LlamaForCausalLM", "rope_llama3", WORDS),
    "gemma3": ("Gemma3ForCausalLM", "as_published", PIECES),
    "deepseek2": ("DeepseekV3ForCausalLM", "v3", WORDS),
    "exaone-moe": ("ExaoneMoeForCausalLM", "window", WORDS),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "h_tiny", WORDS),
    "falcon-h1": ("FalconH1ForCausalLM", "as_published", WORDS),
    "mistral3": ("Ministral3ForCausalLM", "ministral", WORDS),
    "apertus": ("ApertusForCausalLM", "as_published", WORDS),
    "minicpm3": ("MiniCPM3ForCausalLM", "as_published", WORDS),
}
ODD: list[Any] = ["text", "", -1, 0, 1 << 31, 1 << 62, 0.0, -1.0, float("nan"), float("inf"), True, False]
ARRAYS: list[Any] = [["a"], [], np.array([], np.int32), np.arange(3), np.array([np.nan, 1.0]), np.array([True, False])]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for arch, (architecture, variant, words) in MODELS.items():
        own = tiny.build(architecture, variant, folder / arch, **({"vocab_size": 300} if words is PIECES else {}))
        config = load_structure(own).config
        tokenizer = {key: one for key, one in words.items() if key.startswith("tokenizer.")}
        pairs = {**gguf_models.metadata_of(arch, config), **tokenizer, "general.sampling.temp": 0.5}
        tensors = {**gguf_models.tensors_of(own, arch, config), **gguf_models.factors_of(arch, config)}
        found[arch] = gguf_models.write(folder / f"{arch}.gguf", arch, pairs, tensors, gguf_models.plain)
    return found


def changed(file: GgufFile) -> Iterator[tuple[str, Any, GgufFile]]:
    for key in file.metadata:
        for value in [*ODD, *ARRAYS]:
            yield key, value, GgufFile(file.paths, {**file.metadata, key: value}, file.tensors, file.places)


@pytest.mark.parametrize("arch", MODELS)
def test_values_of_every_kind_for_every_key(files, tmp_path, arch):
    """No error is Python's own, and none takes memory or time."""
    file = open_gguf(files[arch])
    config_of(file)
    write_tokenizer(file, tmp_path)
    for key, value, other in changed(file):
        try:
            config_of(other)
            if key.startswith("tokenizer."):
                write_tokenizer(other, tmp_path)
            ends_of(other)
        except (CheckpointError, UnsupportedModelError) as error:
            assert str(files[arch]) in str(error)
        except Exception as error:
            raise AssertionError(f"{key} = {value!r}") from error


@pytest.mark.parametrize("arch", MODELS)
def test_damaged_headers(files, tmp_path, monkeypatch, arch):
    """Bits flipped and numbers replaced, where the keys lie."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    data = files[arch].read_bytes()
    end = data.index(b"token_embd.weight")
    rng = random.Random(len(data))
    for number in range(60):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(24, end)
            if rng.random() < 0.3:
                damaged[place] ^= 1 << rng.randrange(8)
            else:
                value = rng.choice([0, 1, 2, 255, 1 << 31, (1 << 32) - 1])
                damaged[place : place + 4] = rng.choice([struct.pack("<I", value), struct.pack("<f", value)])
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        with contextlib.suppress(QuireError):
            gguf_folder(path)
        path.unlink()
