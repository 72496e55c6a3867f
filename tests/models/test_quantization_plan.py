"""A plan gives layers their formats and says what their rows are made of: whole models with such rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from quire import LLM, CheckpointError, SamplingParams, UnsupportedModelError
from quire.checkpoint.weights import StoredPart
from quire.kernels import QuantizedWeight, RowKind, RowLayout, quantize_rows
from quire.layers import Embedding, Linear
from quire.models import loader, quantization
from quire.models.loader import load_model
from quire.models.quantization import QuantizationPlan, QuantizedLayer
from quire.models.quantization.devices import check_device
from tests.platform.conftest import make_llama

PROMPTS = [[1, 17, 23, 5, 99, 42, 8], [1, 300], [1, *range(40, 90)]]


def as_q8(model: Any, checkpoint: Any, settings: Mapping[str, Any]) -> QuantizationPlan:
    """All layers but those that `skipped` names."""
    layers: dict[str, QuantizedLayer] = {}
    for path, module in model.named_modules():
        if isinstance(module, (Linear, Embedding)) and not any(part in path for part in settings["skipped"]):
            shape = module.weight.shape
            part = StoredPart({f"{path}.weight": shape}, lambda rows: quantize_rows(rows, RowKind.Q8_0))
            tied = path == "lm_head" and model.is_tied
            layers[path] = QuantizedLayer(RowLayout(RowKind.Q8_0, shape[1]), None if tied else part)
    return QuantizationPlan(layers)


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "METHODS", {**quantization.METHODS, "test": as_q8})


def quantized(path: Path, **settings: Any) -> Path:
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "test", "skipped": [], **settings}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def dequantized(path: Path, skipped: tuple[str, ...] = ()) -> Path:
    """The same checkpoint with the numbers that the rows stand for."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in skipped):
            rows = quantize_rows(tensor, RowKind.Q8_0)
            tensors[name] = QuantizedWeight(rows, RowLayout(RowKind.Q8_0, tensor.shape[1])).dequantize()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def scores(path: Path) -> torch.Tensor:
    """Of each prompt's tokens but the first, their logprobs."""
    llm = LLM(path, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    found = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        steps = (output.prompt_logprobs or [])[1:]
        found += [step[token].logprob for token, step in zip(prompt[1:], steps, strict=True) if step]
    return torch.tensor(found)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("skipped", [(), ("k_proj", "down_proj"), ("embed_tokens", "lm_head")])
def test_a_quantized_model_is_that_of_its_numbers(tmp_path: Path, tied: bool, skipped: tuple[str, ...]) -> None:
    for name in ("rows", "numbers"):
        make_llama(tmp_path / name, tie_word_embeddings=tied)
    dequantized(tmp_path / "numbers", skipped)
    found = scores(quantized(tmp_path / "rows", skipped=list(skipped)))
    wanted = scores(tmp_path / "numbers")
    assert len(found) == sum(len(prompt) - 1 for prompt in PROMPTS)
    # x in int8 is off by some 0.4 % in each product.
    assert (found - wanted).square().mean().sqrt() < 0.02 * wanted.square().mean().sqrt()


def test_layers_have_rows_of_bytes_and_the_dtype_is_that_of_activations(tmp_path: Path) -> None:
    make_llama(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    model = load_model(quantized(tmp_path))
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    assert layer.weight.dtype is torch.uint8 and layer.weight.shape == (96, 2 * 34)
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.get_submodule("model.embed_tokens").weight.data_ptr()  # type: ignore[operator]
    assert layer.format.nbytes(layer) == 96 * 68
    assert layer.format.rows(layer, 3, 5).shape == (2, 64)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: 1 \(model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(quantized(tmp_path))


def test_an_unknown_method_is_refused_by_name(tmp_path: Path) -> None:
    make_llama(tmp_path)
    with pytest.raises(UnsupportedModelError, match="quant_method='sevenbit'"):
        load_model(quantized(tmp_path, quant_method="sevenbit"))


def test_quantized_experts_are_refused_on_a_gpu_before_anything_is_read(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
    config = MixtralConfig(
        **sizes, vocab_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    quantized(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.gate_proj: .*Q8_0 have no kernels on a GPU.*'cpu'"):
        load_model(tmp_path, device=torch.device("cuda"))
    make_llama(tmp_path / "llama")
    model, _, _ = loader._build(tmp_path / "llama", "auto", {}, "auto")
    as_q8(model, None, {"skipped": []}).apply(model, torch.bfloat16)
    check_device(model, torch.device("cuda"))  # which has no experts
