"""gpt-oss as it is published: experts' weights in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_model
from tests.models.tiny import make, save
from tests.platform.engine.parity import check_greedy

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}


def published(folder: Path) -> tuple[torch.nn.Module, Path]:
    """(transformers' model with the numbers as it makes floats of them, the files)"""
    model = make("GptOssForCausalLM", "as_published", **SIZES)
    generator = torch.Generator().manual_seed(3)
    path = save(model, folder)
    tensors = load_file(path / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            own = f"model.layers.{layer}.mlp.experts.{name}"
            count, features, columns = tensors.pop(own).shape
            shape = (count, columns, features // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
            tensors[f"{own}_blocks"], tensors[f"{own}_scales"] = blocks, scales
            wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(block.mlp.experts, name).data.copy_(wide)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
    return model, path


def test_four_bits(tmp_path: Path) -> None:
    model, path = published(tmp_path)
    check_greedy(model.double(), path, dtype="float32")


def test_damaged_numbers_are_refused(tmp_path: Path) -> None:
    _, path = published(tmp_path)
    good = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for wrong, message in [
        (good[name][:, :, :0], "down_proj_scales .*has shape"),
        (good[name].float(), "down_proj_scales .*is of dtype float32"),
        (None, "down_proj_scales, which is missing"),
    ]:
        tensors = {**good, name: wrong}
        kept = {key: value for key, value in tensors.items() if value is not None}
        save_file({key: value.contiguous() for key, value in kept.items()}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(path)


def test_rows_that_do_not_fill_shared_powers_are_refused(tmp_path: Path) -> None:
    _, path = published(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(UnsupportedModelError, match=r"down_proj: 32 numbers of MXFP4 share .* its rows have 48"):
        load_model(path)
