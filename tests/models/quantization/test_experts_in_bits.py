"""Experts of every source of quantized weights stay in their bits: no floats beside them, the files' numbers bit by
bit, recorded decode steps, and the same answer in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn

from quire import LLM, SamplingParams, kernels
from quire.kernels.quantized import QuantizedWeight, RowKind, RowLayout, quantize_rows
from quire.layers import ExpertLinear
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.models.quantization import ON_THE_FLY
from tests.checkpoint import gguf_models
from tests.checkpoint.test_gguf_models import gguf_folder, in_blocks
from tests.models import run_model, tiny
from tests.models.rows.test_gpt_oss import published

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 64}
LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
INNER = {"intermediate_size": 96, "moe_intermediate_size": 32}
# (architecture, variant, general.architecture of a GGUF file, sizes)
FAMILIES = [
    ("MixtralForCausalLM", "as_published", "llama", {"intermediate_size": 96}),
    ("Qwen2MoeForCausalLM", "as_published", "qwen2moe", {**INNER, "shared_expert_intermediate_size": 64}),
    ("Qwen3MoeForCausalLM", "as_published", "qwen3moe", INNER),
    ("OlmoeForCausalLM", "as_published", "olmoe", {"intermediate_size": 96}),
    ("DeepseekV2ForCausalLM", "lite", "deepseek2", {**INNER, **LATENTS, "q_lora_rank": None}),
    ("DeepseekV3ForCausalLM", "v3", "deepseek2", {**INNER, **LATENTS}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


def experts_of(model: CausalLM) -> dict[str, ExpertLinear]:
    return {path: one for path, one in model.named_modules() if isinstance(one, ExpertLinear)}


def built(tmp_path: Path, architecture: str, variant: str, sizes: dict[str, Any]) -> tuple[Path, Any]:
    model = tiny.make(architecture, variant, **SIZES, **sizes)
    return tiny.save(model, tmp_path / "hf"), model.config


def plain_of(path: Path, model: CausalLM, tmp_path: Path) -> CausalLM:
    """The same model with floats: the numbers that its rows mean."""
    plain = load_model(path, "float32")
    for place, layer in model.named_modules():
        rows = getattr(getattr(layer, "format", None), "rows", None)
        if rows is not None and layer.weight.dtype is torch.uint8:
            plain.get_submodule(place).weight = nn.Parameter(rows(layer, 0, len(layer.weight)), requires_grad=False)
    return plain


def check_bits(model: CausalLM, numbers: Callable[[str], torch.Tensor]) -> None:
    found = experts_of(model)
    assert found
    for place, layer in found.items():
        assert layer.weight.dtype is torch.uint8, place
        assert torch.equal(layer.format.rows(layer, 0, layer.out_features), numbers(place)), place
    memory = sum(one.numel() * one.itemsize for place, one in model.named_parameters() if ".experts." in place)
    assert memory < 1.1 * sum(layer.in_features * layer.out_features for layer in found.values())


def check_company(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, in chunks and preempted; and every step of one token a sequence is recorded."""
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (9, 20, 1, 12, 5)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)

    def answers(chosen: list[Any], **settings: Any) -> list[Any]:
        llm = LLM(str(path), skip_tokenizer_init=True, **{"num_gpu_blocks_override": 100, **settings})
        outputs = llm.generate(chosen, params, use_tqdm=False)
        if not settings and kernels.backend().__name__ == "quire.kernels.native":
            assert any(llm.llm_engine.executor.runner._decode._shapes.values())
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    together = answers(prompts)
    assert answers(prompts[1:2]) == together[1:2]
    assert answers(prompts, enforce_eager=True, max_num_batched_tokens=7) == together
    assert answers(prompts, block_size=4, num_gpu_blocks_override=11) == together


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
@pytest.mark.parametrize(("architecture", "variant", "arch", "sizes"), FAMILIES)
def test_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, variant: str, arch: str, sizes: Any, kind: str
):
    folder, config = built(tmp_path, architecture, variant, sizes)
    path = gguf_models.convert(
        folder, arch, config, tmp_path / "model.gguf", in_blocks(gguf.GGMLQuantizationType[kind])
    )
    tensors = {one.name: one for one in gguf.GGUFReader(path).tensors}

    def numbers(place: str) -> torch.Tensor:
        layer, _, _, number, leaf = place.split(".")[2:]
        own = tensors[f"blk.{layer}.ffn_{leaf.removesuffix('_proj')}_exps.weight"]
        return torch.from_numpy(gguf.dequantize(own.data[int(number)], own.tensor_type).copy())

    model = load_model(gguf_folder(path))
    check_bits(model, numbers)
    if kind == "Q5_1":
        check_company(gguf_folder(path), monkeypatch)


@pytest.mark.parametrize("name", ON_THE_FLY)
@pytest.mark.parametrize(("architecture", "variant", "arch", "sizes"), FAMILIES)
def test_made_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, variant: str, arch: str, sizes: Any, name: str
):
    folder, _ = built(tmp_path, architecture, variant, sizes)
    floats = load_model(folder, "float32")
    model = load_model(folder, "float32", quantized=name)
    kind = {"int8": RowKind.Q8_0, "int4": RowKind.Q4_1}[name]

    def numbers(place: str) -> torch.Tensor:
        weight = floats.get_submodule(place).weight
        return QuantizedWeight(quantize_rows(weight, kind), RowLayout(kind, weight.shape[1])).dequantize()

    check_bits(model, numbers)
    ids = tiny.token_ids(12)
    got, want = run_model.logits(model, ids), run_model.logits(plain_of(folder, model, tmp_path), ids)
    # Inputs have 8 bits, by which a token may come to another expert.
    assert (got - want).square().mean().sqrt() < 0.5 * want.square().mean().sqrt()
    assert torch.equal(run_model.logits(model, ids, [5, 1, 6]), got)
    assert model.quantization is not None
    wide = model.quantization.for_model(model, torch.device("cuda"))  # whose kernels of experts take floats
    assert model.quantization.layers.keys() - wide.layers.keys() == experts_of(model).keys()


def test_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, path = published(tmp_path)
    stacked = {name: one for name, one in theirs.named_parameters() if "experts" in name}

    def numbers(place: str) -> torch.Tensor:
        experts, number, leaf = place.rsplit(".", 2)
        if leaf == "down_proj":
            return stacked[f"{experts}.down_proj"][int(number)].t()
        return stacked[f"{experts}.gate_up_proj"][int(number), :, int(leaf == "up_proj") :: 2].t()

    check_bits(load_model(path, "float32"), numbers)
    check_company(path, monkeypatch)
