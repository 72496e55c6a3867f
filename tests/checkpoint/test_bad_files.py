"""Files of checkpoints that are refused: tensors that do not fit, damaged files, indexes that point elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.checkpoint.files import INDEX, SINGLE
from quire.errors import CheckpointError
from quire.models.loader import load_model
from tests.checkpoint.checkpoints import GPT2, edit_weights, fails

# What is refused: tensors


def test_missing_and_unused_tensors_are_listed(copy_of):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(48)
        tensors |= {f"extra.{n}": torch.ones(1) for n in range(20)}

    message = fails(
        edit_weights(copy_of(), change),
        CheckpointError,
        "missing: 2 (model.layers.1.mlp.up_proj.weight, model.norm.weight)",
        "of no use: 21 (",
        "extra.0",
        ", ...",
    )
    assert message.count("extra.") <= 10


def test_an_untied_head_may_not_be_missing(copy_of):
    path = edit_weights(copy_of(), lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    fails(path, CheckpointError, "missing: 1 (lm_head.weight)")


def test_ignored_names_are_ignored_exactly(copy_of):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq2": torch.ones(4)}
    fails(edit_weights(copy_of(), lambda t: t | extra), CheckpointError, "rotary_emb.inv_freq2")


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        (torch.ones(33), ("shape (33,)", "(32,)")),
        (torch.ones(32, 1), ("shape (32, 1)",)),
        (torch.ones(32, dtype=torch.int8), ("int8",)),
        (torch.ones(32, dtype=torch.int64), ("int64",)),
        (torch.ones(32).to(torch.float8_e4m3fn), ("float8_e4m3fn",)),
        (torch.ones(32, dtype=torch.bool), ("bool",)),
    ],
)
def test_tensors_that_do_not_fit(copy_of, tensor, parts):
    path = edit_weights(copy_of(), lambda t: t | {"model.norm.weight": tensor})
    fails(path, CheckpointError, "model.norm.weight", SINGLE, *parts)


def test_two_names_for_one_parameter(copy_of):
    path = edit_weights(copy_of(GPT2, "relu"), lambda t: t | {"wpe.weight": t["transformer.wpe.weight"].clone()})
    fails(path, CheckpointError, "'transformer.wpe.weight'", "'wpe.weight'")


# What is refused: files


def test_weights_of_other_names_are_not_opened(copy_of):
    path = copy_of()
    (path / SINGLE).rename(path / "weights.safetensors")
    (path / "optimizer.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    fails(path, CheckpointError, "optimizer.bin", "weights.safetensors", "save_pretrained")
    assert not Path("pwned").exists()


def test_no_weights(copy_of):
    path = copy_of()
    (path / SINGLE).unlink()
    fails(path, CheckpointError, SINGLE)


@pytest.mark.parametrize(
    "damage",
    {
        "directory": None,
        "empty": lambda data: b"",
        "cut in the header": lambda data: data[:100],
        "cut in the data": lambda data: data[:-1000],
        "longer than it says": lambda data: data + b"\0" * 64,
        "header length": lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        "header bytes": lambda data: data[:8] + b"\xff" * 64 + data[72:],
        "lfs pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_files_are_named(copy_of, damage):
    name, change = damage
    path = copy_of()
    if change is None:
        (path / SINGLE).unlink()
        (path / SINGLE).mkdir()
    else:
        (path / SINGLE).write_bytes(change((path / SINGLE).read_bytes()))
    fails(path, CheckpointError, str(path / SINGLE), *(["git lfs pull"] if name == "lfs pointer" else []))


def header_of(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def write_header(path: Path, text: str, size: int | None = None) -> None:
    """Put another header in front of the tensors; with `size`, a hole of so many bytes in their place."""
    data = path.read_bytes()
    tensors = data[8 + struct.unpack("<Q", data[:8])[0] :]
    encoded = text.encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        if size is None:
            file.write(tensors)
        else:
            file.truncate(8 + len(encoded) + size)


def test_a_key_that_is_twice_in_a_header(copy_of):
    """The safetensors package takes the last of them."""
    path = copy_of()
    header = header_of(path / SINGLE)
    first = json.dumps({"model.norm.weight": header["lm_head.weight"]})
    write_header(path / SINGLE, first[:-1] + ", " + json.dumps(header)[1:])
    fails(path, CheckpointError, SINGLE, "'model.norm.weight' is there twice")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda entry: entry | {"data_offsets": [1 << 40, (1 << 40) + 128]}, "begins at byte"),
        (lambda entry: entry | {"data_offsets": entry["data_offsets"][::-1]}, "its shape"),
        (lambda entry: entry | {"data_offsets": [-1, 127]}, "whole numbers"),
        (lambda entry: entry | {"data_offsets": [0, "128"]}, "whole numbers"),
        (lambda entry: entry | {"shape": [1 << 62] * 8}, "its shape"),
        (lambda entry: entry | {"shape": [1] * 100_000 + [32]}, "whole numbers"),
        (lambda entry: entry | {"dtype": "F33"}, "'F33'"),
        (lambda entry: entry | {"dtype": ["F32"]}, "unknown"),
        (lambda entry: [entry], "not by an object"),
    ],
)
def test_a_header_that_lies(copy_of, change, part):
    path = copy_of()
    header = header_of(path / SINGLE)
    name = "model.norm.weight"
    write_header(path / SINGLE, json.dumps(header | {name: change(header[name])}))
    fails(path, CheckpointError, SINGLE, part)


def test_a_large_header_is_not_read(copy_of):
    path = copy_of()
    with (path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", 1 << 31))
        file.truncate(1 << 32)
    fails(path, CheckpointError, SINGLE, "at most 33,554,432 are read")


def test_a_large_file_is_refused_by_its_header(copy_of):
    """Three gigabytes of nothing: neither read nor mapped into memory."""
    path, size = copy_of(), 3 << 30
    header = {"model.norm.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    write_header(path / SINGLE, json.dumps(header), size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, whatever earlier tests have needed
    before = peak_memory()
    fails(path, CheckpointError, "missing")
    assert peak_memory() - before < 200 << 10


def peak_memory() -> int:
    """KiB that have been resident at most."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


def test_a_pipe_is_no_checkpoint(copy_of):
    path = copy_of()
    (path / SINGLE).unlink()
    os.mkfifo(path / SINGLE)
    fails(path, CheckpointError, SINGLE, "no plain file")
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    fails(path, CheckpointError, "config.json")


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_key_that_is_twice_in_a_json_file(copy_of, file):
    path = copy_of()
    if file == INDEX:
        (path / SINGLE).rename(path / "model-1.safetensors")
        names = dict.fromkeys(load_file(path / "model-1.safetensors"), "model-1.safetensors")
        (path / INDEX).write_text(json.dumps({"weight_map": names}))
        load_model(path)
        text = (path / file).read_text().replace('"lm_head.weight":', '"model.norm.weight":', 1)
    else:
        text = (path / file).read_text().replace("{", '{"vocab_size": 5, ', 1)
    (path / file).write_text(text)
    fails(path, CheckpointError, file, "is there twice")


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        7,
        "w.bin",
        "..\\x.safetensors",
        "no.safetensors",
        "x" * 300 + ".safetensors",
        ["a"],
        {},
        None,
    ],
)
def test_an_index_points_at_its_own_directory_only(copy_of, file):
    path = copy_of()
    shutil.copy(path / SINGLE, path.parent / SINGLE)
    (path / SINGLE).rename(path / "model-1.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    fails(path, CheckpointError, INDEX, repr(file))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100000])
def test_a_broken_index(copy_of, text):
    path = copy_of()
    (path / SINGLE).unlink()
    (path / INDEX).write_text(text)
    fails(path, CheckpointError, INDEX)


def test_an_index_that_names_what_is_not_there(copy_of):
    path = copy_of()
    (path / SINGLE).rename(path / "model-1.safetensors")
    names = dict.fromkeys(load_file(path / "model-1.safetensors"), "model-1.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": names | {"ghost": "model-1.safetensors"}}))
    fails(path, CheckpointError, "ghost in model-1.safetensors")
