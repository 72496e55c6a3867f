"""Settings and tensors that are not served: each is refused by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_model
from tests.models.quantization.formats import FORMATS, W8A8_INPUTS, convert
from tests.models.tiny import build

LAYER = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("formats")
    made = {}
    for name in ("gptq_4", "gptq_4_by_activations", "awq", "w4a16", "w4a16_asymmetric", "w4a16_by_activations",
                 "w8a16_int", "fp8_block", "deepseek_fp8", "bnb_8", "nf4", "nf4_double"):  # fmt: skip
        made[name] = build("LlamaForCausalLM", "gqa", folder / name, hidden_size=64, intermediate_size=96, head_dim=16)
        convert(made[name], FORMATS[name])
    return made


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy whose quantization_config has been changed."""
    path = Path(shutil.copytree(source, folder / "changed"))
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    return path


def set_fields(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda settings: settings.update(fields)


def in_group(part: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    def change(settings: dict[str, Any]) -> None:
        group = settings["config_groups"]["group_0"]
        group[part] = {**(group[part] or {}), **fields} if part != "group" else fields
        if part == "group":
            settings["config_groups"]["group_0"] = {**group, **fields}
            del settings["config_groups"]["group_0"]["group"]

    return change


SETTINGS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("gptq_4", set_fields(bits=5), "bits=5"),
    ("gptq_4", set_fields(bits=True), "bits=True"),
    ("gptq_4", set_fields(group_size=0), "group_size=0"),
    ("gptq_4", set_fields(group_size=2**63 - 1), "group_size=9223372036854775807: it must be a whole number from 1 to"),
    ("gptq_4", set_fields(desc_act="yes"), "desc_act='yes'"),
    ("awq", set_fields(group_size=2**63 - 40), "group_size=9223372036854775768"),
    ("gptq_4", set_fields(sym=None, true_symmetry=True), "true_symmetry=True"),
    ("gptq_4", set_fields(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    ("gptq_4", set_fields(is_marlin_format=True), "is_marlin_format=True"),
    ("gptq_4", set_fields(pack_dtype="int64"), "pack_dtype='int64'"),
    ("gptq_4", set_fields(dynamic={"+:.*q_proj": {"bits": 8}}), "dynamic="),
    ("awq", set_fields(version="gemv"), "version='gemv'"),
    ("awq", set_fields(zero_point=False), "zero_point=False"),
    ("awq", set_fields(bits=8), "bits=8"),
    ("awq", set_fields(rotation="hadamard"), "rotation='hadamard'"),
    ("w4a16", set_fields(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    ("w4a16", set_fields(format="marlin-24"), "format='marlin-24'"),
    ("w4a16", set_fields(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format"),
    ("w4a16", set_fields(transform_config={"groups": 1}), "transform_config"),
    ("w4a16", set_fields(moe_sparsity_config={"kept": 1}), "moe_sparsity_config"),
    ("w4a16", in_group("weights", type="float"), "num_bits=4"),
    ("w4a16", in_group("weights", strategy="tensor_group"), "strategy='tensor_group'"),
    ("w4a16", in_group("weights", dynamic=True), "dynamic=True"),
    ("w4a16", in_group("weights", rounding="up"), "rounding='up'"),
    ("w4a16", in_group("weights", group_size=None), "group_size=None"),
    ("w4a16", in_group("output_activations", num_bits=8), "output_activations"),
    ("w4a16", in_group("input_activations", **W8A8_INPUTS), "input_activations: num_bits=8"),
    ("w8a16_int", in_group("input_activations", **{**W8A8_INPUTS, "dynamic": False}), "dynamic=False"),
    ("w8a16_int", in_group("input_activations", **{**W8A8_INPUTS, "symmetric": False}), "symmetric=False"),
    ("w8a16_int", in_group("input_activations", **{**W8A8_INPUTS, "strategy": "tensor"}), "strategy='tensor'"),
    ("fp8_block", in_group("input_activations", **{**W8A8_INPUTS, "type": "float"}), "type='float'"),
    ("fp8_block", in_group("weights", block_structure=[0, 1]), "block_structure"),
    ("deepseek_fp8", set_fields(activation_scheme="static"), "activation_scheme='static'"),
    ("deepseek_fp8", set_fields(fmt="e5m2"), "fmt='e5m2'"),
    ("deepseek_fp8", set_fields(scale_fmt="ue8m0"), "scale_fmt='ue8m0'"),
    ("deepseek_fp8", set_fields(weight_block_size=[128]), "weight_block_size"),
    ("bnb_8", set_fields(load_in_8bit=False), "load_in_4bit=False"),
    ("bnb_8", set_fields(llm_int8_has_fp16_weight=True), "llm_int8_has_fp16_weight=True"),
    ("nf4", set_fields(bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type='int4'"),
    ("nf4", set_fields(bnb_4bit_outliers=3), "bnb_4bit_outliers=3"),
    ("gptq_4", set_fields(quant_method="marlin"), "quant_method='marlin'"),
]


@pytest.mark.parametrize(("name", "change", "message"), SETTINGS, ids=[one[2] for one in SETTINGS])
def test_settings_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(changed(folders[name], tmp_path, change))
    assert message in str(refused.value)


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2]


def plus(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor + value


TENSORS: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = [
    ("gptq_4", "scales", None, "scales is missing"),
    ("gptq_4", "qweight", None, "q_proj"),
    ("gptq_4", "qweight", halved, "qweight .*has shape"),
    ("gptq_4", "qzeros", torch.Tensor.float, "qzeros .*is of dtype float32"),
    ("gptq_4", "qzeros", plus(1), "sym is set"),
    ("gptq_4_by_activations", "g_idx", plus(1), "g_idx .*names groups"),
    ("gptq_4_by_activations", "g_idx", halved, "g_idx .*has shape"),
    ("gptq_4_by_activations", "g_idx", None, "g_idx is missing"),
    ("w4a16_by_activations", "weight_g_idx", None, "weight_g_idx is missing"),
    ("awq", "qzeros", None, "qzeros is missing"),
    ("awq", "scales", torch.Tensor.double, "scales .*is of dtype float64"),
    ("w4a16", "weight_scale", None, "weight_scale is missing"),
    ("w4a16", "weight_packed", None, "weight_packed is missing"),
    ("w4a16", "weight_shape", plus(1), r"weight_shape .*is \[65, 65\]"),
    ("w4a16", "weight_scale", halved, "weight_scale .*has shape"),
    ("w4a16_asymmetric", "weight_zero_point", None, "weight_zero_point is missing"),
    ("w8a16_int", "weight", torch.Tensor.float, "weight .*is of dtype float32"),
    ("fp8_block", "weight_scale", halved, "weight_scale .*has shape"),
    ("deepseek_fp8", "weight", torch.Tensor.float, "weight .*is of dtype float32"),
    ("deepseek_fp8", "weight_scale_inv", halved, "weight_scale_inv .*has shape"),
    ("bnb_8", "SCB", halved, "SCB .*has shape"),
    ("bnb_8", "weight_format", lambda tensor: tensor + 1, "weight_format .*is not 0"),
    ("nf4", "weight.absmax", halved, "absmax .*has shape"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "bitsandbytes__nf4 is missing"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", halved, "is no JSON"),
    ("nf4_double", "weight.nested_quant_map", halved, "nested_quant_map .*has shape"),
]


@pytest.mark.parametrize(("name", "leaf", "change", "message"), TENSORS, ids=[f"{a}-{b}-{d}" for a, b, _, d in TENSORS])
def test_tensors_are_refused_by_name(
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    leaf: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    message: str,
) -> None:
    path = Path(shutil.copytree(folders[name], tmp_path / "changed"))
    tensors = load_file(path / "model.safetensors")
    old = tensors.pop(LAYER + leaf)
    if change is not None:
        tensors[LAYER + leaf] = change(old).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_groups_and_lists_that_contradict_the_files(folders: dict[str, Path], tmp_path: Path) -> None:
    for number, (change, error, message) in enumerate((
        (set_fields(ignore=["re:.*q_proj"]), CheckpointError, "'ignore' names its layer"),
        (set_fields(config_groups={}), CheckpointError, "no group of config_groups"),
        (set_fields(ignore=["re:(a+"]), UnsupportedModelError, "is no pattern"),
    )):  # fmt: skip
        with pytest.raises(error, match=message):
            load_model(changed(folders["w4a16"], tmp_path / str(number), change))


def test_a_pattern_that_takes_for_ever(folders: dict[str, Path], tmp_path: Path) -> None:
    path = changed(folders["w4a16"], tmp_path, set_fields(ignore=["re:(?R)"]))
    with pytest.raises(UnsupportedModelError, match="takes too long"):
        load_model(path)


def test_layers_that_are_none(folders: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(folders["gptq_4"], tmp_path / "changed"))
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.other"): one for name, one in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.other is quantized, and is no layer"):
        load_model(path)


def test_a_mixture_of_groups_is_read_by_name_pattern_and_class(folders: dict[str, Path], tmp_path: Path) -> None:
    """A name outweighs a pattern, and that the class of all."""

    def change(settings: dict[str, Any]) -> None:
        group = settings["config_groups"]["group_0"]
        wrong = {**group, "weights": {**group["weights"], "group_size": 16}}
        settings["config_groups"] = {
            "class": {**wrong, "targets": ["Linear"]},
            "pattern": {**wrong, "targets": ["re:.*self_attn.*"]},
            "rest": {**group, "targets": ["re:.*mlp.*"]},
            "names": {
                **group,
                "targets": [f"model.layers.{i}.self_attn.{one}_proj" for i in range(9) for one in "qkvo"],
            },
        }

    load_model(changed(folders["w4a16"], tmp_path, change))
