"""`quantization="int8"` and `"int4"`: every family's layers get the rows of their floats, and nothing else changes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire.checkpoint.files import SINGLE, Checkpoint
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.kernels.quantized import RowKind, quantize_rows
from quire.layers import Embedding, LatentProjection, Linear, Router
from quire.models.base import CausalLM
from quire.models.loader import fill_again, load_model
from quire.models.quantization import ON_THE_FLY
from tests.checkpoint.checkpoints import edit_config
from tests.models import rows, run_model, tiny

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE
FAMILIES = sorted(rows.all_rows())
IDS = tiny.token_ids(12)


def first(architecture: str) -> str:
    return next(iter(rows.entry(architecture)[2]))


def copied(source: Path, to: Path) -> Path:
    return Path(shutil.copytree(source, to, dirs_exist_ok=True))


def layers_of(model: CausalLM) -> dict[str, Linear | Embedding]:
    return {path: one for path, one in model.named_modules() if isinstance(one, (Linear, Embedding))}


def columns(layer: Linear | Embedding) -> int:
    return layer.size if isinstance(layer, Embedding) else layer.in_features


def floats(layer: Linear | Embedding) -> torch.Tensor:
    """What a layer multiplies by."""
    if isinstance(layer, Embedding):
        return layer.rows(0, layer.num_embeddings)
    return layer.format.rows(layer, 0, layer.out_features)


def may_be_quantized(model: CausalLM, path: str, layer: nn.Module) -> bool:
    """By the words of docs/quantization.md."""
    if isinstance(layer, (LatentProjection, Router)) or model.keeps_float32(f"{path}.weight"):
        return False
    return columns(layer) % 32 == 0 and not (isinstance(layer, Linear) and layer.out_features == 1)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rows_are_those_of_the_floats(checkpoint, architecture):
    path = checkpoint(architecture, first(architecture))
    plain, model = load_model(path, "float32"), load_model(path, "float32", quantized="int8")
    own, count = layers_of(plain), 0
    for name, layer in layers_of(model).items():
        weight = own[name].weight.data
        if may_be_quantized(model, name, layer) and not model.keeps_floats(name):
            want = quantize_rows(weight, RowKind.Q8_0)
            assert torch.equal(layer.weight.data, want), name
            count += 1
        else:
            assert torch.equal(layer.weight.data, weight), name
    assert count == len(model.quantization.layers) and (count or architecture == "PhiForCausalLM")
    for name, parameter in plain.named_parameters():
        if name.removesuffix(".weight") not in model.quantization.layers:
            assert torch.equal(model.get_parameter(name), parameter), name
    assert model.dtype is torch.float32


@pytest.mark.parametrize("name", ON_THE_FLY)
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "CohereForCausalLM", "Phi3ForCausalLM"]
)
def test_logits_are_those_of_the_dequantized_weights(checkpoint, architecture, name):
    """But for the activations, which have 8 bits in these products."""
    path = checkpoint(architecture, first(architecture))
    plain, model = load_model(path, "float32"), load_model(path, "float32", quantized=name)
    for place, layer in layers_of(model).items():
        plain.get_submodule(place).weight = nn.Parameter(floats(layer), requires_grad=False)
    got, want = run_model.logits(model, IDS), run_model.logits(plain, IDS)
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < 0.2  # a random model multiplies what is rounded; of other weights it would be above 1
    assert torch.equal(run_model.logits(model, IDS, [5, 1, 6]), got)


def test_four_bits_for_layers_and_eight_for_tables(checkpoint):
    model = load_model(checkpoint(LLAMA, "gqa"), quantized="int4")
    kinds = {name: RowKind(own.layout.kind) for name, own in model.quantization.layers.items()}
    for name, kind in kinds.items():
        assert (kind is RowKind.Q8_0) == (name in ("model.embed_tokens", "lm_head")), name


@pytest.mark.parametrize("name", ON_THE_FLY)
def test_tied_weights_are_one(checkpoint, name):
    model = load_model(checkpoint(LLAMA, "tied"), quantized=name)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype is torch.uint8


def test_a_tied_pair_that_files_hold_twice(checkpoint, tmp_path):
    tensors = load_file(copied(checkpoint(LLAMA, "tied"), tmp_path) / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    model = load_model(tmp_path, quantized="int8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    other = load_model(tmp_path, quantized="int8")
    assert not torch.equal(other.lm_head.weight, other.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ON_THE_FLY)
@pytest.mark.parametrize("architecture", [LLAMA, GPT2])
def test_every_load_gives_the_same_bits(checkpoint, architecture, name):
    path = checkpoint(architecture, first(architecture))
    model, again = (load_model(path, quantized=name) for _ in range(2))
    for place, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(place), parameter), place
    for parameter in model.parameters():
        parameter.data.fill_(77)
    fill_again(model, Checkpoint(path))
    for place, parameter in again.named_parameters():
        assert torch.equal(model.get_parameter(place), parameter), place


def test_numbers_are_rounded_from_the_files_whatever_the_dtype(checkpoint):
    path = checkpoint(LLAMA, "gqa")
    wide, narrow = (load_model(path, dtype, quantized="int8") for dtype in ("float32", "bfloat16"))
    assert narrow.dtype is torch.bfloat16
    for place in wide.quantization.layers:
        assert torch.equal(wide.get_submodule(place).weight, narrow.get_submodule(place).weight)


def test_what_stays_in_floats_is_named(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, "quire"):
        load_model(checkpoint("PhiForCausalLM", first("PhiForCausalLM")), quantized="int8")
    assert "stay floats: groups of 32 columns" in caplog.text and "model.embed_tokens" in caplog.text


@pytest.mark.parametrize("label", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e7])
def test_numbers_that_no_scale_holds_are_refused(checkpoint, tmp_path, value, label):
    tensors = load_file(copied(checkpoint(LLAMA, "gqa"), tmp_path) / SINGLE)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has numbers that are not finite"):
        load_model(tmp_path, quantized=label)


@pytest.mark.parametrize(
    ("config", "name", "parts"),
    [
        ({}, "awq", ("has no quantization_config", "int8 and int4 make")),
        ({"quantization_config": {"quant_method": "quire"}}, "int8", ("quantized already", "'quire'")),
        ({"quantization_config": {"quant_method": "quire"}}, "gptq", ("quant_method='quire'",)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "int4", ("quantized already",)),
        ({"quantization_config": {"quant_method": "gguf"}}, "int8", ("the file's own blocks, floats too", "Q8_0")),
    ],
)
def test_what_files_do_not_have_is_refused(checkpoint, tmp_path, config, name, parts):
    path = edit_config(copied(checkpoint(LLAMA, "gqa"), tmp_path), **config)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(path, quantized=name)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"), [("awq_marlin", "awq names the same"), ("rtn", "int8 and int4 are"), ("torchao", "not read")]
)
def test_names_of_vllms_are_refused_with_the_reason(name, why):
    from quire import LLM

    with pytest.raises(QuireError, match=why):
        LLM(quantization=name)
    with pytest.raises(QuireError, match="is one of int8, int4"):
        LLM(quantization="another")
