"""Adapters in llama.cpp's format: the bits of the same adapter in PEFT's, whatever the order of rows; and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest
from quire.errors import AdapterError
from tests.lora.gguf_adapter_files import tensors_of, write_gguf
from tests.lora.peft_world import World, ask

Worlds = Callable[..., World]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = gguf.GGMLQuantizationType


def rounded(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: one.to(dtype).float() for name, one in tensors.items()}, folder / "adapter_model.safetensors")


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds("LlamaForCausalLM", "gqa")


def trained(world: World, **fields: Any) -> Path:
    return world.train(LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": EVERY, **fields}))


def answers(llm: LLM, world: World, path: Path) -> list[Any]:
    llm.load_lora_adapter("x", str(path))
    outputs = ask(llm, world.prompts, LoRARequest("x"))
    llm.unload_lora_adapter("x")
    return [(one.outputs[0].token_ids, one.prompt_logprobs) for one in outputs]


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.BF16])
def test_its_bits_are_those_of_pefts_folder(world: World, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    folder = trained(world)
    rounded(folder, {KINDS.F16: torch.float16, KINDS.BF16: torch.bfloat16}.get(kind, torch.float32))
    path = write_gguf(tmp_path / "a.gguf", tensors_of(folder), kind=kind)
    assert world.agree(path, folder)
    assert answers(world.llm, world, path) == answers(world.llm, world, folder)


def test_quantized_pairs(world: World, tmp_path: Path) -> None:
    """Of rank 32, whose rows are whole blocks; the inner width is not, so that some stay as they are."""
    folder = trained(world, r=32, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    tensors = tensors_of(folder)
    path = write_gguf(tmp_path / "a.gguf", tensors, kind=KINDS.Q8_0)
    plain = {name: torch.from_numpy(gguf.dequantize(gguf.quantize(one.contiguous().numpy(), KINDS.Q8_0), KINDS.Q8_0))
             for name, one in tensors.items()}  # fmt: skip
    assert answers(world.llm, world, path) == answers(world.llm, world, write_gguf(tmp_path / "b.gguf", plain))


@pytest.mark.parametrize("alpha", [None, 0.0, -3.0])
def test_alpha(world: World, alpha: float | None, tmp_path: Path) -> None:
    """Without one, or with 0, shares are added as they are."""
    folder = trained(world, lora_alpha=alpha or 4)
    path = write_gguf(tmp_path / "a.gguf", tensors_of(folder), alpha=alpha)
    assert answers(world.llm, world, path) == answers(world.llm, world, folder)


def test_both_ends(world: World, tmp_path: Path) -> None:
    folder = trained(world, target_modules=["embed_tokens", "lm_head", "q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: one for name, one in tensors.items() if "base_layer" not in name},
              folder / "adapter_model.safetensors")  # fmt: skip
    path = write_gguf(tmp_path / "a.gguf", tensors_of(folder))
    assert answers(world.llm, world, path) == answers(world.llm, world, folder)


def test_experts(worlds: Worlds, tmp_path: Path) -> None:
    """All of a layer's in one pair of three dimensions."""
    world = worlds("MixtralForCausalLM", "as_published", num_hidden_layers=2)
    generator = torch.Generator().manual_seed(1)
    parts, stacked = {}, {}
    for layer in range(2):
        for name, own, (inner, outer) in (("gate", "w1", (32, 48)), ("up", "w3", (32, 48)), ("down", "w2", (48, 32))):
            a, b = torch.randn(8, 3, inner, generator=generator) / 6, torch.randn(8, outer, 3, generator=generator) / 3
            stacked |= {
                f"blk.{layer}.ffn_{name}_exps.weight.lora_a": a,
                f"blk.{layer}.ffn_{name}_exps.weight.lora_b": b,
            }
            for expert in range(8):
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{own}"
                parts |= {f"{path}.lora_A.weight": a[expert].clone(), f"{path}.lora_B.weight": b[expert].clone()}
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 3, "lora_alpha": 8, "target_modules": ["w1", "w2", "w3"]}'
    )
    path = write_gguf(tmp_path / "a.gguf", stacked)
    assert answers(world.llm, world, path) == answers(world.llm, world, folder)
    fewer = write_gguf(tmp_path / "b.gguf", {name: one[:7] for name, one in stacked.items()})
    with pytest.raises(AdapterError, match="do not fit this model"):
        world.llm.load_lora_adapter("fewer", str(fewer))


def test_a_request_names_the_file(world: World, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tensors_of(trained(world)))
    outputs = ask(world.llm, world.prompts, LoRARequest("by request", 77, str(path)))
    world.llm.unload_lora_adapter("by request")
    assert [(one.outputs[0].token_ids, one.prompt_logprobs) for one in outputs] == answers(world.llm, world, path)


@pytest.mark.parametrize(
    ("architecture", "variant", "arch"),
    [
        ("Qwen2VLForConditionalGeneration", "mrope", "qwen2vl"),
        ("Qwen2_5_VLForConditionalGeneration", "windows", "qwen2vl"),
        ("Qwen3VLForConditionalGeneration", "deepstack", "qwen3vl"),
        ("Mistral3ForConditionalGeneration", "merged", "mistral3"),
    ],
)
def test_text_models_of_those_that_see(
    worlds: Worlds, architecture: str, variant: str, arch: str, tmp_path: Path
) -> None:
    """Files have the text model's part alone."""
    world = worlds(architecture, variant)
    targets = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj)"
    folder = world.train(LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    # Of a Mistral's rows alone the order is another.
    heads = (world.theirs.config.text_config.num_attention_heads, 2) if arch == "mistral3" else None
    path = write_gguf(tmp_path / "a.gguf", tensors_of(folder, *(heads or (0, 0))), arch)
    assert world.agree(path, folder)
    assert answers(world.llm, world, path) == answers(world.llm, world, folder)


@pytest.mark.parametrize(
    ("architecture", "variant", "arch", "heads", "targets"),
    [
        ("GraniteMoeHybridForCausalLM", "h_micro", "granitehybrid", 4, ["q_proj", "k_proj", "in_proj", "out_proj"]),
        ("ApertusForCausalLM", "as_published", "apertus", 0, ["q_proj", "k_proj", "up_proj", "down_proj"]),
        ("Ministral3ForCausalLM", "ministral", "mistral3", 4, EVERY),
    ],
)
def test_other_families(
    worlds: Worlds, architecture: str, variant: str, arch: str, heads: int, targets: list[str], tmp_path: Path
) -> None:
    world = worlds(architecture, variant)
    folder = world.train(LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    path = write_gguf(tmp_path / "a.gguf", tensors_of(folder, heads, 2), arch)
    world.agree(path, folder)
    found = answers(world.llm, world, path)
    assert found == answers(world.llm, world, folder)
    plain = ask(world.llm, world.prompts, None)
    assert all(own != one.prompt_logprobs for (_, own), one in zip(found, plain, strict=True))


A, B = "blk.0.attn_v.weight.lora_a", "blk.0.attn_v.weight.lora_b"
PAIR = {A: torch.ones(2, 32), B: torch.ones(16, 2)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "other_model": ({"architecture": "qwen2"}, "trained on another base model"),
    "unknown_model": ({"architecture": "llamas"}, "trained on another base model"),
    "half": ({"tensors": {A: PAIR[A]}}, "the other half of the pair is missing"),
    "norm": ({"tensors": {**PAIR, "blk.0.attn_norm.weight": torch.ones(32)}}, "neither A nor B of a pair"),
    "no_such_layer": ({"tensors": {**PAIR, **{name.replace("0", "9"): one for name, one in PAIR.items()}}},
                      "of no use here: 1 .blk.9.attn_v.weight"),
    "ranks": ({"tensors": {A: PAIR[A], B: torch.ones(16, 3)}}, "no pair: of one rank"),
    "columns": ({"tensors": {A: torch.ones(2, 33), B: PAIR[B]}}, "another base model"),
    "rows": ({"tensors": {A: PAIR[A], B: torch.ones(32, 2)}}, "another base model"),
    "of_experts": ({"tensors": {A: torch.ones(1, 2, 32), B: torch.ones(1, 16, 2)}}, "blk.0.attn_v.weight"),
    "alpha": ({"alpha": float("nan")}, "adapter.lora.alpha is nan"),
    "not_finite": ({"tensors": {A: PAIR[A] * float("inf"), B: PAIR[B]}}, "infinite or no numbers"),
    "model": ({"texts": {"general.type": "model"}}, "general.type is 'model'"),
    "control": ({"texts": {"adapter.type": "control"}}, "adapter.type 'control'"),
    "prompt": ({"texts": {"adapter.lora.prompt_prefix": "Say:"}}, "prompt_prefix: it is a text"),
    "activated": ({"texts": {"adapter.alora.invocation_tokens": "1"}}, "an activated LoRA"),
    "other_key": ({"texts": {"llama.rope.freq_base": "1"}}, "the key llama.rope.freq_base is not served"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_right_is_refused(world: World, name: str, tmp_path: Path) -> None:
    fields, why = BAD[name]
    path = write_gguf(tmp_path / "a.gguf", **{"tensors": PAIR, **fields})
    with pytest.raises(AdapterError, match=why):
        world.llm.load_lora_adapter("bad", str(path))
    world.llm.llm_engine.check_integrity()
    assert not world.llm.list_lora_adapters()


def test_damaged_files(world: World, tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "a.gguf", PAIR).read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "bad.gguf"
    for size in (0, 3, 8, 24, 100, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(AdapterError):
            world.llm.load_lora_adapter("bad", str(path))
    for _ in range(60):
        changed = bytearray(good)
        for at in rng.integers(0, min(len(good), 700), 4):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            world.llm.load_lora_adapter("bad", str(path))
        except AdapterError:
            continue
        world.llm.unload_lora_adapter("bad")
    world.llm.llm_engine.check_integrity()


def test_files_lie_in_the_allowed_folders(world: World, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    good, other = write_gguf(inside / "a.gguf", PAIR), write_gguf(outside / "a.gguf", PAIR)
    (inside / "link.gguf").symlink_to(other)
    llm = LLM(str(world.path), enable_lora=True, skip_tokenizer_init=True, num_gpu_blocks_override=64,
              lora_roots=[str(inside)])  # fmt: skip
    llm.load_lora_adapter("good", str(good))
    for path in (other, inside / "link.gguf"):
        with pytest.raises(AdapterError, match="outside the folders"):
            llm.load_lora_adapter("bad", str(path))
    with pytest.raises(AdapterError, match=r"is no folder; .*, or a \.gguf file"):
        (inside / "a.txt").write_text("x")
        llm.load_lora_adapter("bad", str(inside / "a.txt"))
