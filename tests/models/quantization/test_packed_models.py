"""Models with quantized weights answer, to the bit, as those with the same numbers as floats, in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from tests.lora import adapter_files
from tests.models.quantization.formats import FORMATS, Written, convert, is_projection
from tests.models.tiny import build

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [list(range(3, 3 + count)) for count in (9, 20, 1, 12)]
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
# Every way that rows are unpacked; the rest are read into the same ones (test_packed_rows.py).
WAYS = (
    "gptq_4", "gptq_4_by_activations", "gptq_8_by_activations", "awq", "w4a16_asymmetric", "w8a16", "fp8_block",
    "deepseek_fp8", "bnb_8", "nf4_double",
)  # fmt: skip


def answers(path: Path, prompts: list[list[int]] = PROMPTS, owners: Any = None, **settings: Any) -> list[Any]:
    """Of each prompt: its tokens and their logprobs, and the prompt's."""
    llm = LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=100, **settings)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(given, params, lora_request=owners, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


def check(path: Path, written: Written, tmp_path: Path, **settings: Any) -> None:
    convert(path, written, settings.pop("chosen", is_projection), tmp_path / "floats")
    made = answers(path, **settings)
    assert made == answers(tmp_path / "floats", **settings)
    assert answers(path, PROMPTS[1:2], **settings) == made[1:2]
    assert answers(path, max_num_batched_tokens=8, **settings) == made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WAYS)
def test_answers_are_those_of_the_numbers(tmp_path: Path, name: str, dtype: str) -> None:
    path = build("LlamaForCausalLM", "attention_bias", tmp_path / "packed", **SIZES)
    check(path, FORMATS[name], tmp_path, dtype=dtype)


FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 64, "intermediate_size": 96}, "gptq_4"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"hidden_size": 64, "moe_intermediate_size": 32}, "w4a16"),
    "mixtral": ("MixtralForCausalLM", {"hidden_size": 64, "intermediate_size": 96}, "awq"),
    "phi3": ("Phi3ForCausalLM", {"hidden_size": 64, "intermediate_size": 96}, "w8a16"),
}


def chosen_of(path: Path) -> Any:
    """Matrices of whole groups in the layers: what llm-compressor's target "Linear" means."""
    tensors = load_file(path / "model.safetensors")

    def chosen(name: str) -> bool:
        shape = tensors[name].shape
        own = name.startswith("model.layers") and name.endswith(".weight") and len(shape) == 2
        return own and shape[1] % 32 == 0 and shape[0] % 8 == 0 and not name.endswith(".gate.weight")

    return chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    from tests.models import rows

    architecture, sizes, name = FAMILIES[family]
    variant = next(iter(rows.entry(architecture)[2]))
    path = build(architecture, variant, tmp_path / "packed", **sizes)
    chosen = chosen_of(path)
    assert any(map(chosen, load_file(path / "model.safetensors")))
    check(path, FORMATS[name], tmp_path, chosen=chosen)


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("DeepseekV3ForCausalLM", "v3"),
        ("DeepseekV3ForCausalLM", "moonlight"),
        ("DeepseekV3ForCausalLM", "odd_sizes"),
        ("DeepseekV2ForCausalLM", "lite"),
    ],
)
def test_deepseeks_own_blocks(tmp_path: Path, architecture: str, variant: str) -> None:
    """As DeepSeek publishes V3: latents' projections, shared experts and all others; some blocks are cut at an edge."""
    path = build(architecture, variant, tmp_path / "packed")
    names = [name for name in load_file(path / "model.safetensors") if is_deepseeks(name)]
    assert {name.split(".")[-2] for name in names} >= {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"}
    assert any(".experts.7." in name for name in names) and any(".shared_experts." in name for name in names)
    check(path, FORMATS["deepseek_fp8"], tmp_path, chosen=is_deepseeks)


def is_deepseeks(name: str) -> bool:
    return "proj" in name.split(".")[-2] and name.endswith(".weight")


def test_adapters_are_added_to_quantized_weights(tmp_path: Path) -> None:
    path = build("LlamaForCausalLM", "attention_bias", tmp_path / "packed", hidden_size=64, intermediate_size=96)
    convert(path, FORMATS["nf4"], into=tmp_path / "floats")
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    shapes = {name: tuple(one.shape) for name, one in load_file(tmp_path / "floats" / "model.safetensors").items()}
    targets = ("self_attn.q_proj", "mlp.down_proj")
    tensors = {}
    for name in shapes:
        stem = name.removesuffix(".weight")
        if stem.endswith(targets):
            n, k = shapes[name]
            generator = torch.Generator().manual_seed(n + k)
            tensors[f"base_model.model.{stem}.lora_A.weight"] = torch.randn(4, k, generator=generator) / 4
            tensors[f"base_model.model.{stem}.lora_B.weight"] = torch.randn(n, 4, generator=generator) / 4
    fields = adapter_files.config(targets=targets, r=4)
    adapter = adapter_files.write(tmp_path / "adapter", fields, tensors)
    owners = [None, LoRARequest("a", 1, str(adapter)), None, LoRARequest("a", 1, str(adapter))]
    made = answers(path, owners=owners, enable_lora=True)
    assert made == answers(tmp_path / "floats", owners=owners, enable_lora=True)
    assert made[1] != answers(path)[1]


def test_tokens_of_eight_bits(tmp_path: Path) -> None:
    """W8A8: what layers are given is rounded, so that answers are near those of the numbers; and they are as much
    everybody's own as all others."""
    path = build("LlamaForCausalLM", "attention_bias", tmp_path / "packed", **SIZES)
    convert(path, FORMATS["w8a8"], into=tmp_path / "floats")
    made = answers(path)
    assert answers(path, PROMPTS[1:2]) == made[1:2]
    assert answers(path, max_num_batched_tokens=8) == made
    wanted = answers(tmp_path / "floats")
    differences = [
        abs(ours[token].logprob - theirs[token].logprob)
        for (_, _, own), (_, _, other) in zip(made, wanted, strict=True)
        for ours, theirs in zip(own[1:], other[1:], strict=True)
        for token in ours.keys() & theirs.keys()
    ]
    assert 0 < max(differences) < 1


def test_a_tied_projection_of_floats_stays_tied(tmp_path: Path) -> None:
    path = build("LlamaForCausalLM", "tied", tmp_path / "packed", **SIZES)
    check(path, FORMATS["w4a16"], tmp_path)


def test_a_quantized_projection_to_the_vocabulary(tmp_path: Path) -> None:
    path = build("LlamaForCausalLM", "gqa", tmp_path / "packed", vocab_size=96, **SIZES)
    check(path, FORMATS["gptq_8"], tmp_path, chosen=lambda name: name == "lm_head.weight" or is_projection(name))


def test_several_files_say_how(tmp_path: Path) -> None:
    """GPTQ's and AWQ's own files of settings, where config.json has none."""
    for name, file, more in (
        ("gptq_4", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "bits": None, "group_size": None}),
    ):
        path = build("LlamaForCausalLM", "gqa", tmp_path / name / "packed", **SIZES)
        convert(path, FORMATS[name], into=tmp_path / name / "floats")
        config = json.loads((path / "config.json").read_text())
        settings = {**config.pop("quantization_config"), **more}
        (path / "config.json").write_text(json.dumps(config))
        del settings["quant_method"]
        (path / file).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        assert answers(path) == answers(tmp_path / name / "floats")


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
