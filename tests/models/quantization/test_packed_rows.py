"""Rows of every format given back in float are the numbers that the format says, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.layers.quantization import QuantizedRows
from quire.models.loader import load_model
from tests.models.quantization.formats import FORMATS, compressed_floats, compressed_ints, convert
from tests.models.tiny import build


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_numbers_of_the_format(tmp_path: Path, name: str) -> None:
    path = build("LlamaForCausalLM", "attention_bias", tmp_path, hidden_size=96, intermediate_size=160, head_dim=32)
    numbers = convert(path, FORMATS[name])
    model = load_model(path)
    for stored, wanted in numbers.items():
        layer = model.get_submodule(stored.removesuffix(".weight"))
        assert isinstance(layer.format, QuantizedRows)
        assert torch.equal(layer.format.rows(layer, 0, len(wanted)), wanted), stored


HUGE = 1 << 38


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gptq_4_v2", {"group_size": 1 << 31}),
        ("awq_whole", {"group_size": 1 << 31}),
        ("fp8_block_whole", {"block_structure": [HUGE, HUGE]}),
        ("w4a16_of_one_group", {"group_size": (1 << 63) - 1}),
        ("deepseek_fp8_large_blocks", {"weight_block_size": [HUGE, HUGE]}),
    ],
)
def test_blocks_larger_than_a_weight_are_all_of_it(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    """And take no memory for what is not there."""
    path = build("LlamaForCausalLM", "gqa", tmp_path, hidden_size=64, intermediate_size=96, head_dim=16)
    more = {"fp8_block_whole": compressed_floats("block", (128, 128)), "w4a16_of_one_group": compressed_ints(4, 96)}
    numbers = convert(path, {**FORMATS, **more}[name])
    config = json.loads((path / "config.json").read_text())
    settings = config["quantization_config"]
    if "config_groups" in settings:
        settings = settings["config_groups"]["group_0"]["weights"]
    assert fields.keys() <= settings.keys()
    settings.update(fields)
    (path / "config.json").write_text(json.dumps(config))
    model = load_model(path)
    for stored, wanted in numbers.items():
        layer = model.get_submodule(stored.removesuffix(".weight"))
        assert torch.equal(layer.format.rows(layer, 0, len(wanted)), wanted), stored


@pytest.mark.parametrize("name", ["nf4", "nf4_double"])
def test_a_block_larger_than_a_weight_of_bitsandbytes(tmp_path: Path, name: str) -> None:
    path = build("LlamaForCausalLM", "gqa", tmp_path, hidden_size=64, intermediate_size=96, head_dim=16)
    convert(path, FORMATS[name])
    stem = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(path / "model.safetensors")
    state = json.loads(bytes(tensors[f"{stem}.quant_state.bitsandbytes__nf4"].tolist()))
    state["blocksize"] = HUGE
    tensors[f"{stem}.absmax"] = tensors[f"{stem}.absmax"][:1].clone()
    if name == "nf4_double":
        state["nested_blocksize"] = HUGE
    bytes_ = list(json.dumps(state).encode())
    tensors[f"{stem}.quant_state.bitsandbytes__nf4"] = torch.tensor(bytes_, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    layer = load_model(path).get_submodule(stem.removesuffix(".weight"))
    rows = layer.format.rows(layer, 0, 64)
    codes = tensors[stem].view(torch.uint8).view(64, -1)
    wide = tensors[f"{stem}.quant_map"][torch.stack((codes >> 4, codes & 15), -1).flatten(1).int()]
    assert torch.equal(rows / rows.abs().max(), wide / wide.abs().max())
