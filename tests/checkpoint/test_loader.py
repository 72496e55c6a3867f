"""What the loader takes, what it refuses, and what memory it needs."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoint import weights
from quire.checkpoint.files import INDEX, SINGLE
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models import loader
from quire.models.loader import load_config, load_model, resolve_checkpoint
from tests.models import run_model, tiny

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE


@pytest.fixture
def copy_of(checkpoint, tmp_path):
    """copy_of(architecture, variant) -> a directory of the test's own."""

    def copy(architecture: str = LLAMA, variant: str = "gqa") -> Path:
        return Path(shutil.copytree(checkpoint(architecture, variant), tmp_path / f"{architecture}-{variant}"))

    return copy


def edit_config(path: Path, **fields) -> Path:
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def edit_weights(path: Path, change) -> Path:
    tensors = load_file(path / SINGLE)
    save_file(change(tensors) or tensors, path / SINGLE, metadata={"format": "pt"})
    return path


def logits_of(path: Path, dtype="auto") -> torch.Tensor:
    return run_model.logits(load_model(path, dtype), tiny.token_ids(12))


def fails(path: Path, error: type[Exception], *parts: str, dtype="auto") -> str:
    with pytest.raises(error) as caught:
        load_model(path, dtype)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


# What is taken


def test_the_model_comes_ready(checkpoint):
    model = load_model(checkpoint(LLAMA, "gqa"))
    assert not model.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in tiny.make(LLAMA, "gqa").named_parameters()]


@pytest.mark.parametrize(
    ("architecture", "variant"), [(LLAMA, "gqa"), (LLAMA, "tied"), (OPT, "projected"), (GPT2, "relu")]
)
def test_shards(checkpoint, tmp_path, architecture, variant):
    path = tiny.save(tiny.make(architecture, variant), tmp_path, max_shard_size="20KB")
    assert (path / INDEX).exists() and not (path / SINGLE).exists()
    assert len(list(path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(path), logits_of(checkpoint(architecture, variant)))


@pytest.mark.parametrize(
    ("stored", "named", "asked", "got"),
    [
        ("float32", "float32", "auto", torch.float32),
        ("float16", "float16", "auto", torch.float16),
        ("bfloat16", "bfloat16", "auto", torch.bfloat16),
        ("float32", "bfloat16", "auto", torch.bfloat16),
        ("float16", None, "auto", torch.float16),
        ("float64", "float32", "auto", torch.float32),
        ("float16", "float16", "float32", torch.float32),
        ("float16", "float16", "float", torch.float32),
        ("float32", "float32", "half", torch.float16),
        ("float32", "float32", "float16", torch.float16),
        ("float32", "float32", "bfloat16", torch.bfloat16),
        ("float32", "float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes(copy_of, stored, named, asked, got):
    path = edit_config(copy_of(), dtype=named if named else ..., torch_dtype=named if named else ...)
    edit_weights(path, lambda tensors: {k: v.to(getattr(torch, stored)) for k, v in tensors.items()})
    assert {parameter.dtype for parameter in load_model(path, asked).parameters()} == {got}


@pytest.mark.parametrize("asked", ["int8", "float64", "fp8", torch.int32])
def test_other_dtypes_are_refused(checkpoint, asked):
    fails(checkpoint(LLAMA, "gqa"), CheckpointError, str(asked).removeprefix("torch."), "bfloat16", dtype=asked)


@pytest.mark.parametrize(
    ("architecture", "variant", "prefix", "replacement"),
    [
        (GPT2, "relu", "transformer.", ""),
        (OPT, "projected", "model.decoder.", "decoder."),
    ],
)
def test_both_namings(copy_of, checkpoint, architecture, variant, prefix, replacement):
    path = copy_of(architecture, variant)
    edit_weights(path, lambda tensors: {k.replace(prefix, replacement, 1): v for k, v in tensors.items()})
    assert torch.equal(logits_of(path), logits_of(checkpoint(architecture, variant)))


def test_tensors_that_old_versions_stored_are_ignored(copy_of):
    llama, gpt2 = copy_of(LLAMA, "gqa"), copy_of(GPT2, "relu")
    edit_weights(llama, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "transformer.h.1.attn.masked_bias": torch.ones(1),
    }
    edit_weights(gpt2, lambda t: t | masks)
    load_model(llama), load_model(gpt2)


def test_tied_weights(copy_of, checkpoint):
    """As transformers: an absent one takes the other's; equal ones are one; different ones stay two."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    model = load_model(checkpoint(LLAMA, "tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    want = logits_of(checkpoint(LLAMA, "tied"))
    path = copy_of(LLAMA, "tied")

    edit_weights(path, lambda t: {head if k == embed else k: v for k, v in t.items()})
    assert torch.equal(logits_of(path), want)
    edit_weights(path, lambda t: t | {embed: t[head].clone()})
    model = load_model(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    edit_weights(path, lambda t: t | {head: 2 * t[head]})
    assert torch.equal(logits_of(path), 2 * want)


def test_a_present_head_is_used_where_none_is_tied(checkpoint):
    model = load_model(checkpoint(LLAMA, "gqa"))
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_weights_outlive_their_file(copy_of):
    """The file may be cut or replaced under a loaded model: nothing of it is mapped any more."""
    path = copy_of()
    model = load_model(path)
    want = run_model.logits(model, tiny.token_ids(12))
    gc.collect()
    assert str((path / SINGLE).resolve()) not in Path("/proc/self/maps").read_text()
    (path / SINGLE).write_bytes(b"")
    assert torch.equal(run_model.logits(model, tiny.token_ids(12)), want)


def test_a_file_cut_while_it_is_read(copy_of, monkeypatch):
    path = copy_of()

    class Cut(loader.Checkpoint):
        def read(self, *arguments):
            with open(path / SINGLE, "r+b") as file:
                file.truncate(os.path.getsize(path / SINGLE) // 2)
            super().read(*arguments)

    monkeypatch.setattr(loader, "Checkpoint", Cut)
    fails(path, CheckpointError, SINGLE, "was cut while it was read")


def test_weights_that_do_not_fit(checkpoint, monkeypatch):
    monkeypatch.setattr(weights.huge_pages, "available_bytes", lambda device: 50_000)
    fails(checkpoint(LLAMA, "gqa"), CheckpointError, "weights take", "as float32", "50,000 are available")


def test_loading_in_inference_mode(checkpoint):
    with torch.inference_mode():
        load_model(checkpoint(LLAMA, "gqa"), "bfloat16")
        load_model(checkpoint(GPT2, "relu"))


def test_a_file_replaced_while_it_is_read(copy_of, checkpoint, monkeypatch):
    """All of the model is of one file, the one that was opened."""
    path, reads = copy_of(), []
    other = edit_weights(Path(shutil.copytree(path, f"{path}-other")), lambda t: {k: v + 1 for k, v in t.items()})

    class Replaced(loader.Checkpoint):
        def read(self, *arguments):
            reads.append(arguments)
            if len(reads) == 4:
                os.replace(other / SINGLE, path / SINGLE)
            super().read(*arguments)

    monkeypatch.setattr(loader, "Checkpoint", Replaced)
    assert torch.equal(logits_of(path), logits_of(checkpoint(LLAMA, "gqa")))
    assert len(reads) > 4


def test_large_tensors_are_read_in_pieces(copy_of, checkpoint, monkeypatch):
    monkeypatch.setattr(weights, "_PIECE", 1000)
    assert torch.equal(logits_of(copy_of()), logits_of(checkpoint(LLAMA, "gqa")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_memory_does_not_double(tmp_path, dtype):
    """A loaded model takes its weights' memory and next to nothing beside, whatever dtype the file has."""
    tiny.save(
        tiny.make(LLAMA, "gqa", vocab_size=4000, hidden_size=512, intermediate_size=2048, head_dim=64).bfloat16(),
        tmp_path,
    )
    code = """
import sys, psutil, torch
from quire.models.loader import load_config, load_model
import quire.models.llama, quire.checkpoint.weights
load_config(sys.argv[1]), torch.ones(9, 9).abs().max()
own = lambda: sum(m.anonymous for m in psutil.Process().memory_maps())
before = own()
model = load_model(sys.argv[1], sys.argv[2])
total = sum(float(p.max()) for p in model.parameters())
print(own() - before, sum(p.nbytes for p in model.parameters()))
"""
    command = [sys.executable, "-c", code, str(tmp_path), dtype]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    private, weights = map(int, out.stdout.split())
    assert weights > 20e6
    assert private < 1.1 * weights + 4e6


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


# What is refused: configurations


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff\xfe", "null"])
def test_a_broken_configuration(copy_of, text):
    path = copy_of()
    (path / "config.json").write_text(text, encoding="latin-1")
    fails(path, CheckpointError, str(path / "config.json"))


def test_no_configuration(copy_of):
    path = copy_of()
    (path / "config.json").unlink()
    fails(path, CheckpointError, str(path / "config.json"), "No such file")


def test_a_configuration_that_transformers_refuses(copy_of):
    fails(edit_config(copy_of(), hidden_size="many"), CheckpointError, "config.json", "hidden_size")


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        (LLAMA, {"sliding_window": 8}, "sliding_window=8"),
        (LLAMA, {"is_causal": False}, "is_causal=False"),
        (LLAMA, {"attention_chunk_size": 4}, "attention_chunk_size=4"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (LLAMA, {"partial_rotary_factor": 0.5, "rope_parameters": ...}, "partial_rotary_factor=0.5"),
        (LLAMA, {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        (LLAMA, {"hidden_act": "prelu"}, "'prelu'"),
        (LLAMA, {"hidden_act": "thunk"}, "'thunk'"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        (LLAMA, {"vision_config": {"hidden_size": 8}}, "vision_config"),
        (
            LLAMA,
            {"architectures": ["PaliGemmaForConditionalGeneration", "LlamaForCausalLM"]},
            "PaliGemmaForConditionalGeneration",
        ),
        (LLAMA, {"architectures": []}, "no architecture"),
        (LLAMA, {"architectures": ...}, "no architecture"),
        (LLAMA, {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "never runs code"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 8, "layer_types": ...}, "sliding_window=8"),
        (QWEN2, {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2, {"partial_rotary_factor": 0.5, "rope_parameters": ...}, "transformers' qwen2 turns whole heads"),
        (OPT, {"num_attention_heads": 5}, "num_attention_heads=5"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True"),
        (GPT2, {"n_head": 5}, "n_head=5"),
    ],
)
def test_configurations_that_are_not_served(copy_of, architecture, fields, named):
    variant = next(iter(tiny.TABLE[architecture][2]))
    fails(edit_config(copy_of(architecture, variant), **fields), UnsupportedModelError, named)


def test_a_window_that_is_not_used_is_none(copy_of, checkpoint):
    """Published Qwen2 checkpoints, written by transformers 4, have one (131072 or so) and use_sliding_window=false."""
    path = edit_config(
        copy_of(QWEN2, "gqa"), use_sliding_window=False, sliding_window=8, max_window_layers=1, layer_types=...,
        rope_parameters=..., rope_theta=10000.0,
    )  # fmt: skip
    assert torch.equal(logits_of(path), logits_of(checkpoint(QWEN2, "gqa")))


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("architecture", "field", "values"),
    [
        *((LLAMA, name, (0, -8, "8", True)) for name in (
            "hidden_size", "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads",
            "num_hidden_layers", "intermediate_size", "max_position_embeddings",
        )),
        (LLAMA, "num_hidden_layers", (10**9,)),
        (LLAMA, "head_dim", (7,)),
        (LLAMA, "rms_norm_eps", (float("nan"), -1e-5, None, "x")),
        (LLAMA, "rope_theta", ("x", 0, -1.0, float("nan"))),
        (LLAMA, "factor", (0, -2.0, float("nan"), "x", 1e-5)),
        (LLAMA, "architectures", ([5], [["LlamaForCausalLM"]], {"a": 1}, "LlamaForCausalLM")),
        (LLAMA, "quantization_config", ("gptq", ["gptq"])),
        (LLAMA, "layer_types", (5, [["full_attention"]])),
        (LLAMA, "hidden_act", (["silu"], 5)),
        (LLAMA, "model_type", (["llama"],)),
        *((OPT, name, (0, -8, "8")) for name in ("ffn_dim", "word_embed_proj_dim", "num_hidden_layers")),
        *((GPT2, name, (0, -8, "8")) for name in ("n_embd", "n_head", "n_layer", "n_positions", "n_inner")),
        (GPT2, "layer_norm_epsilon", (float("nan"), -1e-5, None)),
    ],
)  # fmt: skip
def test_damaged_fields_are_refused_at_load(copy_of, architecture, field, values):
    """Not with a traceback, nor taken in and then of no use to any request."""
    path = copy_of(architecture, next(iter(tiny.TABLE[architecture][2])))
    original = (path / "config.json").read_text()
    for value in values:
        (path / "config.json").write_text(original)
        fields = {"rope_parameters": ROPE | {field: value}} if field in ROPE else {field: value}
        with pytest.raises((CheckpointError, UnsupportedModelError)):
            load_model(edit_config(path, **fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: its files hold 30 tensors"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers=5000: its files hold 30 tensors"),
        ({"hidden_size": 10**6}, "hidden_size=1000000: the longest side of its files' tensors is 97"),
        ({"head_dim": 2**31 - 1}, "head_dim=2147483647: the longest side"),
        ({"a_number": 10**400}, "a_number has 401 digits"),
        ({"pad_token_id": 2**40}, "pad_token_id=1099511627776: it must be a token id"),
        ({"bos_token_id": -2}, "bos_token_id=-2: it must be a token id"),
        ({"eos_token_id": [2, "2"]}, "eos_token_id=[2, '2']: it must be a token id"),
        ({"outer": {"inner": {"depth": 10**6, "some_token_index": 5}}}, "outer.inner.depth=1000000"),
    ],
)
def test_numbers_are_compared_with_the_files_before_anything_is_built(copy_of, monkeypatch, fields, named):
    monkeypatch.setattr(loader, "load_config", lambda path: pytest.fail("nothing is to be built of it"))
    fails(edit_config(copy_of(), **fields), CheckpointError, "config.json", named)


@pytest.mark.parametrize("fields", [{"pad_token_id": -1}, {"pad_token_id": 100}, {"max_window_layers": 5000}])
def test_numbers_that_real_checkpoints_have(copy_of, fields):
    load_model(edit_config(copy_of(), **fields))


def test_files_without_tensors(copy_of):
    path = edit_config(copy_of(), dtype=..., torch_dtype=...)
    save_file({}, path / SINGLE)
    fails(path, CheckpointError, "no tensors")


def test_code_that_comes_with_a_checkpoint_does_not_run(copy_of):
    path = edit_config(copy_of(), auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (path / "own.py").write_text("raise SystemExit('ran')")
    assert load_config(path).model_type == "llama"  # transformers' own class; the map is not followed
    load_model(path)


# Where a model is found


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="no revision 'main'"):
        resolve_checkpoint(tmp_path, "main")
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_checkpoint(tmp_path.name).resolve() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_checkpoint(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "../absent",
        "/absent/model",
        "~/absent",
        "a/b/c",
        "absent/",
        "a\\b",
        "",
        " ",
        "~nouserzz/x",
        "./" + "x" * 300,
    ],
)
def test_paths_never_reach_the_hub(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("sent to the hub"))
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_checkpoint(name)


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model\.gguf.* is a file"):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


def test_a_revision_pins_the_one_snapshot_that_everything_comes_from(monkeypatch, tmp_path):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("some/model", "abc123") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("some/model", "abc123")
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_what_the_hub_says_is_repeated(monkeypatch):
    def download(*args, **options):
        raise OSError("the cable is out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"some/model.*revision 'v1'.*OSError: the cable is out"):
        resolve_checkpoint("some/model", "v1")


@pytest.mark.parametrize("name", ["bad name", "a--b/c", "-x", "x" * 200, "x" * 300, "a\0b"])
def test_names_that_are_no_hub_ids(name):
    with pytest.raises(CheckpointError, match="HFValidationError"):
        resolve_checkpoint(name)


def test_offline_the_cache_serves(tmp_path):
    """With HF_HUB_OFFLINE, a cached model is found at its revision, and an absent one is refused."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text(revision)
    code = """
from quire.errors import CheckpointError
from quire.checkpoint.files import resolve_checkpoint
print(resolve_checkpoint("some/model"))
print(resolve_checkpoint("some/model", "0123456789abcdef0123456789abcdef01234567"))
for name, revision in (("some/model", "other"), ("some/absent", None)):
    try:
        resolve_checkpoint(name, revision)
    except CheckpointError as error:
        print("refused", name, revision)
"""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.splitlines() == [
        str(snapshot),
        str(snapshot),
        "refused some/model other",
        "refused some/absent None",
    ]


def test_transformers_models_are_not_imported(checkpoint):
    """Loading takes transformers' configurations only: its modelling code costs a second and 100 MB."""
    code = """
import sys
from quire.models.loader import load_model
for path in sys.argv[1:]:
    load_model(path)
unwanted = [f"modeling_{name}" for name in ("utils", "llama", "opt", "gpt2")]
print([m for m in sys.modules if m.split(".")[-1] in unwanted])
"""
    variants = ((LLAMA, "rope_llama3"), (OPT, "gelu"), (GPT2, "gelu_new"))
    paths = [str(checkpoint(*variant)) for variant in variants]
    out = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
