"""What `quire quantize` writes: loaded, it is bit for bit what `quantization` makes while a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quire.checkpoint.files import INDEX, SINGLE, Checkpoint
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.models.loader import fill_again, load_model
from quire.models.quantization import ON_THE_FLY, keep
from tests.checkpoint.checkpoints import edit_config
from tests.models import rows, run_model, tiny

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


def first(architecture: str) -> str:
    return next(iter(rows.entry(architecture)[2]))


@pytest.mark.parametrize("architecture", sorted(rows.all_rows()))
def test_every_family_is_read_as_it_was_made(checkpoint, tmp_path, architecture):
    path = checkpoint(architecture, first(architecture))
    keep.keep(path, tmp_path / "out", "int4", quiet)
    same(load_model(tmp_path / "out"), load_model(path, quantized="int4"))
    same(load_model(tmp_path / "out", "bfloat16"), load_model(path, "bfloat16", quantized="int4"))


def same(model, want) -> None:
    names = {name for name, _ in want.named_parameters(remove_duplicate=False)}
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == names
    for name in names:
        one, other = model.get_parameter(name), want.get_parameter(name)
        assert one.dtype is other.dtype and torch.equal(one, other), name
    for name, buffer in want.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert model.dtype is want.dtype


@pytest.mark.parametrize("name", ON_THE_FLY)
@pytest.mark.parametrize(("architecture", "variant"), [(LLAMA, "tied"), (LLAMA, "gqa"), (GPT2, "gelu_new")])
def test_logits_and_a_second_reading(checkpoint, tmp_path, architecture, variant, name):
    path, ids = checkpoint(architecture, variant), tiny.token_ids(12)
    keep.keep(path, tmp_path / "out", name, quiet)
    model = load_model(tmp_path / "out")
    want = run_model.logits(load_model(path, quantized=name), ids)
    assert torch.equal(run_model.logits(model, ids), want)
    for parameter in model.parameters():
        parameter.data.fill_(77)
    fill_again(model, Checkpoint(tmp_path / "out"))
    assert torch.equal(run_model.logits(model, ids), want)
    assert torch.equal(run_model.logits(load_model(tmp_path / "out", quantized="quire"), ids), want)


def test_files_are_read_one_by_one(checkpoint, monkeypatch, tmp_path):
    path = checkpoint(LLAMA, "gqa")
    monkeypatch.setattr(keep, "_LARGEST", 10_000)
    (tmp_path / "source").mkdir()
    for file in path.iterdir():
        shutil.copy(file, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "notes.md").write_text("not of the model")
    written = keep.keep(tmp_path / "source", tmp_path / "out", "int8", quiet)
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(shards) > 3 and set(index["weight_map"].values()) == {one.name for one in shards}
    sizes = 0
    for shard in shards:
        with safe_open(shard, "pt") as file:
            sizes += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (no dict)
    assert sizes == written.after == index["metadata"]["total_size"] < written.before
    assert {one.name for one in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "config.json"}
    assert not (tmp_path / "out" / "notes.md").exists()
    same(load_model(tmp_path / "out"), load_model(path, quantized="int8"))


def test_nothing_is_written_over(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="is there already"):
        keep.keep(checkpoint(LLAMA, "gqa"), tmp_path / "out", "int8", quiet)
    assert not list((tmp_path / "out").iterdir())


def test_what_is_ended_early_leaves_nothing(checkpoint, tmp_path):
    def end(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep.keep(checkpoint(LLAMA, "gqa"), tmp_path / "out", "int8", end)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        keep.keep(checkpoint(LLAMA, "gqa"), tmp_path / "file" / "out", "int8", quiet)


def test_what_has_fewer_bits_already_is_refused(checkpoint, tmp_path):
    keep.keep(checkpoint(LLAMA, "gqa"), tmp_path / "out", "int8", quiet)
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        keep.keep(tmp_path / "out", tmp_path / "again", "int4", quiet)
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        load_model(tmp_path / "out", quantized="int4")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"form": 2}, "make the folder anew"),
        ({"bits": 4}, "make the folder anew"),
        ({"group_size": 64}, "make the folder anew"),
        ({"quantization": ["int8"]}, "make the folder anew"),
        ({"more": 1}, "make the folder anew"),
    ],
)
def test_settings_of_another_kind(checkpoint, tmp_path, change, error):
    out = tmp_path / "out"
    keep.keep(checkpoint(LLAMA, "gqa"), out, "int8", quiet)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    edit_config(out, quantization_config={**settings, **change})
    with pytest.raises(QuireError, match=error):
        load_model(out)


@pytest.mark.parametrize("columns", [33, 35, 68])
def test_rows_of_another_length(checkpoint, tmp_path, columns):
    from safetensors.torch import load_file, save_file

    out: Path = tmp_path / "out"
    keep.keep(checkpoint(LLAMA, "gqa"), out, "int8", quiet)
    tensors = load_file(out / SINGLE)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = torch.zeros((len(tensors[name]), columns), dtype=torch.uint8)
    save_file(tensors, out / SINGLE)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: its shape"):
        load_model(out)
