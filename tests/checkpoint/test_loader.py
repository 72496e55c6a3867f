"""From a directory to a model: what is taken, and what loading costs."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.checkpoint import opening, weights
from quire.checkpoint.files import INDEX, SINGLE
from quire.errors import CheckpointError
from quire.models.loader import load_model
from tests.checkpoint.checkpoints import GPT2, LLAMA, OPT, edit_config, edit_weights, fails, logits_of
from tests.models import run_model, tiny


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

    class Cut(opening.Checkpoint):
        def read(self, *arguments):
            with open(path / SINGLE, "r+b") as file:
                file.truncate(os.path.getsize(path / SINGLE) // 2)
            super().read(*arguments)

    monkeypatch.setattr(opening, "Checkpoint", Cut)
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

    class Replaced(opening.Checkpoint):
        def read(self, *arguments):
            reads.append(arguments)
            if len(reads) == 4:
                os.replace(other / SINGLE, path / SINGLE)
            super().read(*arguments)

    monkeypatch.setattr(opening, "Checkpoint", Replaced)
    assert torch.equal(logits_of(path), logits_of(checkpoint(LLAMA, "gqa")))
    assert len(reads) > 4


def test_large_tensors_are_read_in_pieces(copy_of, checkpoint, monkeypatch):
    monkeypatch.setattr(weights, "_PIECE", 1000)
    assert torch.equal(logits_of(copy_of()), logits_of(checkpoint(LLAMA, "gqa")))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
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
