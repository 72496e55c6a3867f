"""Adapters on quantized bases against PEFT on the model that the rows mean, by kinds of rows and of adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from quire import LoRARequest
from quire.errors import AdapterError, UnsupportedModelError
from quire.kernels import RowKind, RowLayout
from quire.layers.quantization import QuantizedRows
from quire.models.baichuan import BaichuanConfig, BaichuanForCausalLM
from quire.models.loader import load_model
from quire.models.quantization import QuantizationPlan, QuantizedLayer
from tests.lora.peft_world import ask
from tests.lora.quantized_world import MIXED, QuantizedExpected, QuantizedWorld, uniform

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ENDS = [*EVERY, "embed_tokens", "lm_head"]

CONFIGS: dict[str, dict[str, Any]] = {
    "every": {"target_modules": EVERY},
    "both_ends": {"target_modules": ENDS, "use_rslora": True},
    "patterns": {"target_modules": EVERY, "rank_pattern": {"q_proj": 33, "down_proj": 1},
                 "alpha_pattern": {"v_proj": 3}},
    "dora": {"target_modules": ENDS, "use_dora": True},
    "lora_bias": {"target_modules": EVERY, "lora_bias": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["mlp", "norm", "lm_head", "embed_tokens"]},
    "save_part_of_merged": {"target_modules": ["q_proj"], "modules_to_save": ["k_proj", "up_proj"]},
    "embedding_and_saved_head": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"], "use_dora": True},
    "tokens_of_embedding": {"target_modules": EVERY, "trainable_token_indices": {"embed_tokens": [3, 50, 7, 8]}},
}  # fmt: skip
KINDS = {kind: uniform(kind) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "AFFINE4")} | {"mixed": MIXED}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "kinds",
    ["mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "mixed")],
)
def test_a_field_does_what_it_does_in_peft(quantized_worlds, kinds: str, name: str) -> None:
    world: QuantizedWorld = quantized_worlds("LlamaForCausalLM", KINDS[kinds])
    assert world.agree(world.train(LoraConfig(**{"r": 4, **CONFIGS[name]})))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases(quantized_worlds, bias: str) -> None:
    world = quantized_worlds("LlamaForCausalLM", MIXED, "attention_bias")
    assert world.agree(world.train(LoraConfig(r=4, target_modules=EVERY, bias=bias, use_dora=True)))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": EVERY, "modules_to_save": ["lm_head"]},
        {"target_modules": EVERY, "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
    ],
    ids=str,
)
def test_tied_tables(quantized_worlds, fields: dict[str, Any]) -> None:
    world = quantized_worlds("LlamaForCausalLM", uniform("Q6_K"), "tied")
    assert world.agree(world.train(LoraConfig(r=4, **fields)))


def test_tokens_of_the_head(quantized_worlds) -> None:
    """PEFT multiplies all rows again, as floats: so does the oracle, and the trained rows alone are the engine's."""
    world = quantized_worlds("LlamaForCausalLM", KINDS["AFFINE4"])
    fields = {"trainable_token_indices": {"embed_tokens": [3, 50], "lm_head": [60, 7, 8]}}
    assert world.agree(world.train(LoraConfig(r=4, target_modules=EVERY, **fields)))


def test_a_mixture(quantized_worlds) -> None:
    world = quantized_worlds("LlamaForCausalLM", MIXED)
    paths = [world.train(LoraConfig(r=rank, target_modules=EVERY), seed=rank) for rank in (2, 5)]
    for path in paths:
        world.load(path)
    parts = list(zip([path.name for path in paths], (0.7, -0.4), strict=True))
    outputs = ask(world.llm, world.prompts, LoRARequest("mixture", adapters=parts))
    world.check(outputs, QuantizedExpected(world, *paths, weights=[0.7, -0.4]))
    for path in paths:
        world.llm.unload_lora_adapter(path.name)


def test_embeddings_that_are_the_base_models_are_left_out(quantized_worlds) -> None:
    """PEFT writes tables beside LoRA on them (save_embedding_layers): as numbers, which the rows mean."""
    world = quantized_worlds("LlamaForCausalLM", MIXED)
    plain = world.train(LoraConfig(r=4, target_modules=["embed_tokens"]))
    assert any("base_layer" in name for name in load_file(plain / "adapter_model.safetensors"))
    size = world.llm.load_lora_adapter("plain", str(plain)).bytes
    world.llm.unload_lora_adapter("plain")
    assert size < 64 * (97 + 256) * 4


def test_shapes_are_those_of_the_numbers(quantized_worlds) -> None:
    """Not of the bytes: neither an adapter of these shapes binds, nor does a table of such rows."""
    world = quantized_worlds("LlamaForCausalLM", uniform("Q8_0"))
    other = quantized_worlds("LlamaForCausalLM", MIXED, hidden_size=512)
    path = other.train(LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(AdapterError, match=r"\[97, 512\], the model's is \[97, 256\]"):
        world.llm.load_lora_adapter("wide", str(path))
    world.llm.llm_engine.check_integrity()


def test_what_is_absorbed_is_made_of_rows(quantized_worlds) -> None:
    """Latent attention absorbs kv_b_proj: where it is quantized, it is made floats of, once."""
    kinds = {"kv_b_proj": "Q8_0", "o_proj": "Q4_0", "q_proj": "Q8_0", "kv_a_proj_with_mqa": "Q4_K"}
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    world = quantized_worlds("DeepseekV2ForCausalLM", kinds, "lite", num_key_value_heads=4, **sizes)
    assert world.agree(world.train(LoraConfig(r=4, target_modules=[*kinds], use_dora=True)))
    model = load_model(world.path, "float32")
    own, other = (model.get_submodule(f"model.layers.0.self_attn.{one}") for one in ("kv_b_proj", "o_proj"))
    assert torch.equal(own.weight, world.theirs.get_submodule("model.layers.0.self_attn.kv_b_proj").weight)
    assert isinstance(other.format, QuantizedRows)


def test_what_must_be_floats_and_is_shared_is_refused() -> None:
    config = BaichuanConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                            vocab_size=64, norm_head=True)  # fmt: skip
    with torch.device("meta"):
        model = BaichuanForCausalLM(config)
    plan = QuantizationPlan({"lm_head": QuantizedLayer(RowLayout(RowKind.Q8_0, 64), None)})
    with pytest.raises(UnsupportedModelError, match="lm_head shares quantized rows, and the model needs floats there"):
        plan.for_model(model)
