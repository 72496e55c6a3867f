"""A server of a GGUF file, with adapters in llama.cpp's format: by a flag, by the route, and by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig

from quire import LLM, LoRARequest, SamplingParams
from tests.checkpoint import gguf_models
from tests.lora.gguf_adapter_files import write_gguf
from tests.server.api_answers import post
from tests.server.api_server import ONE_THREAD, ServerProcess, adapters
from tests.server.routes.helpers import COMPLETIONS, LOAD, UNLOAD

TEXT = "abcdefgh"
Answers = Callable[[Path | None], str]


def adapter(path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (columns, rows) in {"attn_q": (32, 32), "attn_v": (32, 16), "ffn_down": (64, 32)}.items():
        for layer in range(2):
            place = f"blk.{layer}.{name}.weight"
            tensors[f"{place}.lora_a"] = torch.randn(4, columns, generator=generator)
            tensors[f"{place}.lora_b"] = torch.randn(rows, 4, generator=generator)
    return write_gguf(path, tensors)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the server may load adapters from."""
    return tmp_path_factory.mktemp("gguf-adapters")


@pytest.fixture(scope="module")
def model(plain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def kind_of(name: str, array: Any) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.Q8_0 if array.ndim > 1 else gguf.GGMLQuantizationType.F32

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return gguf_models.convert(plain_model, "llama", LlamaConfig.from_pretrained(plain_model), path, kind_of)


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter outside the folder that clients may name: the operator names it."""
    return adapter(tmp_path_factory.mktemp("flagged") / "own.gguf", 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def http(model: Path, plain_model: Path, root: Path, flagged: Path, cache: Path) -> Iterator[Any]:
    flags = ["--model", str(model), "--served-model-name", "base", "--tokenizer", str(plain_model), *adapters(root)]
    environment = {**ONE_THREAD, "QUIRE_CACHE": str(cache)}
    with (
        ServerProcess(*flags, "--lora-modules", f"flagged={flagged}", **environment) as server,
        server.http() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected(model: Path, plain_model: Path, cache: Path) -> Iterator[Answers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(cache))
        llm = LLM(str(model), tokenizer=str(plain_model), enable_lora=True, num_gpu_blocks_override=64)

    ids: dict[Path, int] = {}

    def ask(path: Path | None) -> str:
        request = None if path is None else LoRARequest(path.stem, 1 + ids.setdefault(path, len(ids)), str(path))
        params = SamplingParams(temperature=0, max_tokens=24)
        return llm.generate(TEXT, params, lora_request=request, use_tqdm=False)[0].outputs[0].text

    yield ask


def told(http: Any, name: str) -> str:
    return post(http, COMPLETIONS, model=name, prompt=TEXT, temperature=0, max_tokens=24)["choices"][0]["text"]


def test_the_flag_names_a_file(http: Any, flagged: Path, expected: Answers) -> None:
    names = [one["id"] for one in http.get("/v1/models").json()["data"]]
    assert names == ["base", "flagged"]
    assert told(http, "base") == expected(None)
    assert told(http, "flagged") == expected(flagged) != expected(None)


@pytest.mark.parametrize("absolute", [True, False])
def test_the_route_loads_a_file(http: Any, root: Path, expected: Answers, absolute: bool) -> None:
    path = adapter(root / "loaded.gguf", 2)
    answer = http.post(LOAD, json={"lora_name": "x", "lora_path": str(path) if absolute else path.name})
    assert answer.status_code == 200, answer.text
    assert told(http, "x") == expected(path) != expected(None)
    assert http.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
    assert http.post(COMPLETIONS, json={"model": "x", "prompt": TEXT}).status_code == 404


def test_a_request_names_a_file(http: Any, root: Path, expected: Answers) -> None:
    path = adapter(root / "named.gguf", 3)
    assert told(http, "named.gguf") == expected(path) != expected(None)


@pytest.mark.parametrize(
    ("make", "status", "part"),
    [
        (lambda root, flagged: flagged, 403, "lora_path"),
        (lambda root, flagged: root / "nothing.gguf", 404, "lora_path"),
        (lambda root, flagged: _damaged(root, flagged), 422, "damaged or no GGUF file"),
        (lambda root, flagged: write_gguf(root / "other.gguf", {"blk.0.attn_q.weight.lora_a": torch.ones(2, 32)},
                                          "qwen2"), 422, "the other half of the pair is missing"),
    ],
    ids=["outside", "nothing", "damaged", "half"],
)  # fmt: skip
def test_what_is_refused(http: Any, root: Path, flagged: Path, make: Any, status: int, part: str) -> None:
    answer = http.post(LOAD, json={"lora_name": "bad", "lora_path": str(make(root, flagged))})
    assert answer.status_code == status, answer.text
    assert part in answer.json()["error"]["message"]
    assert "bad" not in [one["id"] for one in http.get("/v1/models").json()["data"]]


def _damaged(root: Path, flagged: Path) -> Path:
    path = root / "damaged.gguf"
    path.write_bytes(flagged.read_bytes()[:100])
    return path
