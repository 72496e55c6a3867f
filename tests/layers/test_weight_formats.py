"""A weight format is one object: 8 bits with a scale for each row, made here, loads, multiplies, and takes adapters.

It must be to the bit what a float checkpoint of the same numbers is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire import (
    LLM,
    AdapterError,
    CheckpointError,
    LoRARequest,
    SamplingParams,
    UnsupportedModelError,
    kernels,
    registry,
)
from quire.layers import Linear, MergedLinear
from quire.layers.weight_formats import FLOAT_ROWS
from quire.models.llama import LlamaForCausalLM
from quire.models.loader import load_model
from tests.lora import adapter_files
from tests.platform.conftest import make_llama

NAME = "EightBitLlamaForCausalLM"


class EightBitRows:
    def add_tensors(self, layer: Any, bias: bool) -> None:
        shape = layer.out_features, layer.in_features
        layer.register_buffer("qweight", torch.empty(shape, dtype=torch.int8))
        layer.register_buffer("scales", torch.empty(layer.out_features))
        own = nn.Parameter(torch.empty(layer.out_features), requires_grad=False) if bias else None
        layer.register_parameter("bias", own)

    def multiply(
        self, x: torch.Tensor, layers: Any, out_dtype: Any = None, tables: Any = (), segments: Any = None
    ) -> torch.Tensor:
        weights = [self.rows(layer, 0, layer.out_features).to(x.dtype) for layer in layers]
        return kernels.linear(x, weights, [layer.bias for layer in layers], out_dtype, tables, segments)

    def nbytes(self, layer: Any) -> int:
        return layer.qweight.nbytes + layer.scales.nbytes

    def rows(self, layer: Any, first: int, end: int) -> torch.Tensor:
        return layer.qweight[first:end].float() * layer.scales[first:end, None]


EIGHT_BITS = EightBitRows()


class EightBitLlama(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.set_format(EIGHT_BITS, module.bias is not None)


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        row = registry.Row(NAME, f"{__name__}:EightBitLlama", package="tests")
        patch.setattr(registry, "plugin_rows", lambda: (row,))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The 8-bit checkpoint, and the same numbers as floats."""
    folder = tmp_path_factory.mktemp("formats")
    made = {"float": folder / "float", "eight": folder / "eight"}
    make_llama(made["float"], attention_bias=True)
    tensors = load_file(made["float"] / "model.safetensors")
    eight = dict(tensors)
    for name in [one for one in tensors if one.endswith("proj.weight")]:
        weight, stem = eight.pop(name), name.removesuffix("weight")
        eight[stem + "scales"] = 2 ** (weight.abs().amax(1) / 127).log2().ceil()  # so that bfloat16 has the products
        eight[stem + "qweight"] = (weight / eight[stem + "scales"][:, None]).round().to(torch.int8)
        tensors[name] = eight[stem + "qweight"].float() * eight[stem + "scales"][:, None]
    shutil.copytree(made["float"], made["eight"])
    config = json.loads((made["eight"] / "config.json").read_text())
    (made["eight"] / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}))
    save_file(tensors, made["float"] / "model.safetensors", metadata={"format": "pt"})
    save_file(eight, made["eight"] / "model.safetensors", metadata={"format": "pt"})
    return made


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=100, enable_lora=True, **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_same_numbers_in_floats(folders: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    adapters = {
        "plain": adapter_files.plain(tmp_path / "plain", targets=adapter_files.ALL),
        "dora": adapter_files.dora(tmp_path / "dora"),
        "tokens": adapter_files.trained_tokens(tmp_path / "tokens"),
    }
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (9, 20, 1, 12)]
    owners = [None, *(LoRARequest(name, lora_path=str(path)) for name, path in adapters.items())]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, logprobs=3)
    answers = []
    for folder in folders.values():
        llm = open_llm(folder, dtype=dtype)
        outputs = llm.generate(prompts, params, lora_request=owners, use_tqdm=False)
        answers.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens, _ in answers[0]}) == 4


def test_what_a_layer_weighs_and_its_rows(folders: dict[str, Path]) -> None:
    eight, plain = (load_model(folders[name]).model.layers[0].mlp.up_proj for name in ("eight", "float"))
    inner, outer = plain.in_features, plain.out_features
    assert plain.format is FLOAT_ROWS and eight.format is EIGHT_BITS
    assert plain.format.nbytes(plain) == 4 * inner * outer and eight.format.nbytes(eight) == outer * (inner + 4)
    assert torch.equal(eight.format.rows(eight, 3, 9), plain.format.rows(plain, 3, 9))
    assert torch.equal(plain.format.rows(plain, 3, 9), plain.weight[3:9])


def test_rows_of_half_precision_are_given_as_float32(folders: dict[str, Path]) -> None:
    layer = load_model(folders["float"], dtype="bfloat16").model.layers[0].mlp.up_proj
    stored = load_file(folders["float"] / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    rows = layer.format.rows(layer, 0, 4)
    assert rows.dtype is torch.float32 and torch.equal(rows, stored[:4].bfloat16().float())


def test_tensors_of_a_format_are_matched_like_all_others(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["eight"], tmp_path / "eight"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.qweight"
    save_file({**tensors, name: tensors[name].float()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.qweight .* is of dtype float32"):
        load_model(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: 1 .model\.layers\.0\.mlp\.up_proj\.qweight"):
        load_model(folder)


def test_weights_that_are_not_floats_are_not_replaced_by_an_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    made = adapter_files.tensors(targets=("self_attn.q_proj",))
    made["base_model.model.model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64)
    fields = adapter_files.config(targets=("self_attn.q_proj",), modules_to_save=["up_proj"])
    path = adapter_files.write(tmp_path / "saved", fields, made)
    with pytest.raises(AdapterError, match="up_proj"):
        open_llm(folders["eight"]).load_lora_adapter("saved", str(path))


@pytest.mark.parametrize("given", [{"quant_method": "hqq"}, "awq", {"bits": 4}])
def test_a_format_that_nobody_knows_is_refused(folders: dict[str, Path], tmp_path: Path, given: Any) -> None:
    folder = Path(shutil.copytree(folders["float"], tmp_path / "quantised"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": given}))
    with pytest.raises(UnsupportedModelError, match="quantised checkpoints are not served"):
        load_model(folder)


def test_merged_layers_are_the_layers_side_by_side() -> None:
    generator = torch.Generator().manual_seed(1)
    layers = [Linear(16, size, bias=bias) for size, bias in ((5, True), (8, False))]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(3, 16, generator=generator)
    assert torch.equal(MergedLinear(*layers)(x), torch.cat([layer(x) for layer in layers], dim=1))
