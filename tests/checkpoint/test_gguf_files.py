"""Where GGUF models are found, what is made of them once, and their tokenizers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from gguf import GGUFReader
from transformers import AutoTokenizer

from quire import LLM
from quire.checkpoint import smollm2
from quire.checkpoint.files import Hub, resolve_checkpoint, resolve_weights
from quire.checkpoint.gguf import folder as folders
from quire.checkpoint.gguf.file import open_gguf, open_tensors
from quire.checkpoint.gguf.folder import gguf_folder
from quire.checkpoint.gguf.header import read_gguf_header
from quire.checkpoint.hub import choose, fetch_gguf
from quire.errors import CheckpointError
from tests.checkpoint import gguf_models
from tests.checkpoint.gguf_bytes import STRING, info, value, whole
from tests.checkpoint.test_smollm2 import plain_tokenizer
from tests.models import run_model, tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path) -> Path:
    made = tiny.make("LlamaForCausalLM", "gqa")
    return gguf_models.convert(tiny.save(made, tmp_path / "hf"), "llama", made.config, tmp_path / "there" / "tiny.gguf")


@pytest.fixture(autouse=True)
def there(tmp_path):
    (tmp_path / "there").mkdir()


def test_a_file_and_its_folder_are_one_model(model, cache):
    folder = resolve_weights(model)
    assert folder.parent == cache / "gguf"
    assert folder == resolve_checkpoint(str(model.parent)) == resolve_weights(str(model))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "tiny.gguf").resolve() == model.resolve()
    with pytest.raises(CheckpointError, match="has no revision 'v1'"):
        resolve_checkpoint(model, "v1")


def test_a_changed_file_is_read_anew_and_a_gone_one_is_forgotten(model):
    first = gguf_folder(model)
    os.utime(model, ns=(1, 1))
    second = gguf_folder(model)
    assert first != second
    model.rename(model.with_name("other.gguf"))
    gguf_folder(model.with_name("other.gguf"))
    assert not first.exists()
    assert not second.exists()


def test_a_start_reads_the_header_once(model, monkeypatch):
    read = []

    def counted(file, size):
        read.append(size)
        return read_gguf_header(file, size)

    monkeypatch.setattr("quire.checkpoint.gguf.file.read_gguf_header", counted)
    first = LLM(str(model), skip_tokenizer_init=True, num_gpu_blocks_override=16)
    assert len(read) == 1
    first.sleep()
    first.wake_up()
    assert len(read) == 1
    os.utime(model, ns=(1, 1))
    LLM(str(model), skip_tokenizer_init=True, num_gpu_blocks_override=16)
    assert len(read) == 2


def test_what_was_read_before_is_of_the_same_files_alone(model):
    """By a link, names are the link's; a file that has changed, or is another, is read."""
    gguf_folder(model)
    link = model.with_name("link.gguf")
    link.symlink_to(model)
    assert set(open_tensors(link).places.values()) == {link}
    assert open_tensors(link).tensors == open_gguf(model).tensors
    before = open_tensors(model).tensors
    made = tiny.make("LlamaForCausalLM", "gqa", num_hidden_layers=1)
    folder = tiny.save(made, model.parent / "other")
    gguf_models.convert(folder, "llama", made.config, model)
    assert len(open_tensors(model).tensors) < len(before)
    model.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_tensors(model)


def test_another_quire_makes_it_anew(model, monkeypatch):
    """What an older one made of a file may be wrong."""
    first = gguf_folder(model)
    assert gguf_folder(model) == first
    monkeypatch.setattr("quire.checkpoint.gguf.folder.__version__", "99.0")
    assert gguf_folder(model) != first


def test_a_folder_with_two_models_asks_which(model):
    model.with_name("other.gguf").write_bytes(model.read_bytes())
    with pytest.raises(CheckpointError, match=r"several GGUF models: other\.gguf, tiny\.gguf"):
        resolve_checkpoint(str(model.parent))


def test_a_cache_that_cannot_be_written(model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    folder = gguf_folder(model)
    assert (folder / "config.json").exists()


def test_the_faster_of_two_processes_wins(model, cache, monkeypatch):
    write = folders._write

    def slower(file, making, source):
        write(file, making, source)
        winner = cache / "gguf" / f"tiny-{folders._key([model], source)}"
        winner.mkdir()
        (winner / "config.json").write_text("theirs")

    monkeypatch.setattr(folders, "_write", slower)
    folder = gguf_folder(model)
    assert (folder / "config.json").read_text() == "theirs"
    assert list(folder.parent.iterdir()) == [folder]


def test_damaged_files(model):
    data = model.read_bytes()
    for cut in (0, 3, 100, len(data) - 1):
        model.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match="damaged or no GGUF file"):
            gguf_folder(model)


# Split models


def split(folder: Path) -> Path:
    one = whole(
        {"general.architecture": value(STRING, "llama"), "split.no": value(2, 0), "split.count": value(2, 2),
         "split.tensors.count": value(5, 2)}, [info("a", [8], 0, 0)], b"\0" * 32,
    )  # fmt: skip
    two = whole({"split.no": value(2, 1), "split.count": value(2, 2)}, [info("b", [8], 0, 0)], b"\1" * 32)
    (folder / "m-00001-of-00002.gguf").write_bytes(one)
    (folder / "m-00002-of-00002.gguf").write_bytes(two)
    return folder / "m-00002-of-00002.gguf"


def test_all_parts_are_one_model(tmp_path):
    file = open_gguf(split(tmp_path))
    assert [path.name for path in file.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert set(file.tensors) == {"a", "b"}
    assert file.places["b"].name == "m-00002-of-00002.gguf"


def test_parts_that_are_missing_or_others(tmp_path):
    last = split(tmp_path)
    first = tmp_path / "m-00001-of-00002.gguf"
    first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="1 are not there: m-00001"):
        open_gguf(last)
    with pytest.raises(CheckpointError, match="is a part of 2"):
        open_gguf(tmp_path / "alone.gguf")
    first.write_bytes(last.read_bytes())
    with pytest.raises(CheckpointError, match=r"says that it is part 1 of 2 \(from 0\), not 0"):
        open_gguf(first)


# On the hub

FILES = [
    "README.md", "mmproj-F16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-IQ4_K_M.gguf",
    "big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("F16", FILES[-2:]),
        ("big/m-F16-00002-of-00002.gguf", FILES[-2:]),
    ],
)
def test_which_file_of_a_repository(wanted, found):
    assert choose(FILES, wanted, "a/b") == found


@pytest.mark.parametrize("wanted", ["Q5_0", "none.gguf", "K_M"])
def test_a_file_that_a_repository_does_not_have(wanted):
    with pytest.raises(CheckpointError, match=r"its GGUF files: .*m-Q8_0\.gguf"):
        choose(FILES, wanted, "a/b")


def test_one_file_is_fetched_alone(model, monkeypatch):
    asked = []

    def download(repository, name, **options):
        asked.append((repository, name, options["revision"], options["cache_dir"], options["token"]))
        return str(model)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    path = resolve_weights("some/repo:tiny.gguf", "v1", hub=Hub("/models", "secret"))
    assert path == gguf_folder(model)
    assert asked == [("some/repo", "tiny.gguf", "v1", "/models", "secret")]


def test_what_the_hub_says_is_repeated(monkeypatch):
    def download(*arguments, **options):
        raise OSError("the cable is out")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(CheckpointError, match=r"'a/b:c\.gguf' at revision 'v1'.*OSError: the cable is out"):
        fetch_gguf("a/b:c.gguf", "v1", Hub())


# Tokenizers

TEXTS = [
    "In 1969, 12345 people", "naïve ü 日本語 \n\n  def f(x):\n\treturn x**2", "<|im_start|>user\nHi<|im_end|>", "",
    "   ",
    "🦙🦙 e\u0301 \u00e9",
]  # fmt: skip


def test_the_real_files_tokenizer():
    """Texts come back as they were, and become what SmolLM2's own steps make of them."""
    path, _ = smollm2.packaged_file()
    own, other = AutoTokenizer.from_pretrained(gguf_folder(path)), plain_tokenizer(GGUFReader(path))
    for text in [*TEXTS, *topics.values()]:
        ids = own.encode(text)
        assert ids == other.encode(text).ids
        assert own.decode(ids) == text


def without_layers(tmp_path: Path, pairs: dict, rows: int) -> Path:
    """A file of which nothing but the tokenizer is looked at."""
    tensors = {"token_embd.weight": np.zeros((rows, 8)), "blk.0.attn_q.weight": np.zeros((8, 8))}
    return gguf_models.write(tmp_path / "a.gguf", "llama", pairs, tensors, gguf_models.plain)


def test_scores_become_merges(tmp_path):
    """SentencePiece's BPE joins what has the highest score, wherever it stands; what is no token becomes bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{one:02X}>" for one in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
    types = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 263 + [-2.0, -1.0, -3.0]
    pairs = {
        "vocab_size": 266, "block_count": 1, "embedding_length": 8, "feed_forward_length": 8,
        "attention.head_count": 1, "context_length": 16, "attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }  # fmt: skip
    path = without_layers(tmp_path, pairs, 266)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(path))
    text = "abc é"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == ["<s>", "▁a", "bc", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tokenizer.ggml.pre": "of-tomorrow"}, "'of-tomorrow', which says how texts are cut"),
        ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "are both 'a'"),
        ({"tokenizer.ggml.token_type": [1]}, "must be 2 numbers"),
    ],
)
def test_tokenizers_that_cannot_be_made(tmp_path, change, part):
    pairs = {
        "block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 1,
        "context_length": 16, "attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, 1],
    }  # fmt: skip
    pairs["tokenizer.ggml.merges"] = ["a b"]
    path = without_layers(tmp_path, {**pairs, **change}, 2)
    with pytest.raises(CheckpointError, match=part):
        gguf_folder(path)


def test_it_runs(model):
    from quire.models.loader import load_model

    assert run_model.logits(load_model(gguf_folder(model)), tiny.token_ids(8)).isfinite().all()
