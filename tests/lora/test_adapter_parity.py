"""Text models' adapters against PEFT: every field of a LoRA configuration, on its own and with others.

PEFT makes, saves and reloads each adapter, all of its tensors random, and runs alone in float64; the engine serves it
in float32. Greedy tokens are the same over 32 steps, prompt logprobs within 1e-4, and tokens differ from the base's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from quire.errors import AdapterError
from tests.lora.conftest import Worlds
from tests.lora.peft_world import edit

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ATTN = {"r": 4, "target_modules": ATTENTION}
ALL = {"r": 4, "target_modules": EVERY}

LLAMA: dict[str, dict[str, Any]] = {
    "one_module": {"r": 2, "target_modules": ["q_proj"]},
    "middle_of_merged": {"r": 3, "target_modules": ["k_proj"]},
    "attention": ATTN,
    "mlp": {"r": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "every": ALL,
    "rank_1": {**ALL, "r": 1},
    "rank_33": {**ALL, "r": 33},
    "rank_above_width": {**ALL, "r": 64},
    "alpha": {**ALL, "lora_alpha": 13},
    "rslora": {**ALL, "use_rslora": True, "lora_alpha": 5},
    "rank_pattern": {**ALL, "rank_pattern": {"q_proj": 7, "down_proj": 2}},
    "alpha_pattern": {**ALL, "alpha_pattern": {"v_proj": 3, "up_proj": 31}},
    "full_names_in_patterns": {**ALL, "rank_pattern": {"model.layers.0.self_attn.q_proj": 9},
                               "alpha_pattern": {"layers.1.mlp.up_proj": 50}},
    "anchored_patterns": {**ALL, "rank_pattern": {"^model.layers.0.self_attn.q_proj": 9, "^q_proj": 3},
                          "alpha_pattern": {"^layers": 50, "^model.layers.1.*": 3}},
    "regex_patterns": {**ALL, "rank_pattern": {r"layers\.\d+\.mlp\..*": 3, r".*\.0\..*q_proj": 6},
                       "alpha_pattern": {r"(q|k)_proj": 9, r"layers\.1\..*": 2}},
    # PEFT sorts them when it saves them, so that only some orders can be read again.
    "first_pattern_counts": {**ALL, "rank_pattern": {"layers.0.self_attn.q_proj": 6, "q_proj": 2},
                             "alpha_pattern": {"q_proj": 6, "self_attn.q_proj": 2}},
    "patterns_rslora": {**ALL, "use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"q_proj": 9}},
    "dora": {**ALL, "use_dora": True},
    "dora_rslora_patterns": {**ALL, "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 9},
                             "alpha_pattern": {"up_proj": 3}},
    "lora_bias": {**ALL, "lora_bias": True},
    "lora_bias_rslora": {**ALL, "lora_bias": True, "use_rslora": True, "alpha_pattern": {"q_proj": 3}},
    "save_head": {**ATTN, "modules_to_save": ["lm_head"]},
    "save_embedding": {**ATTN, "modules_to_save": ["embed_tokens"]},
    "save_head_and_embedding": {**ATTN, "modules_to_save": ["lm_head", "embed_tokens"]},
    "save_norm": {**ATTN, "modules_to_save": ["norm"]},
    "save_input_layernorm": {**ATTN, "modules_to_save": ["input_layernorm"]},
    "save_one_norm": {**ATTN, "modules_to_save": ["layers.1.post_attention_layernorm"]},
    "save_mlp": {**ATTN, "modules_to_save": ["mlp"]},
    "save_linear": {**ATTN, "modules_to_save": ["down_proj", "gate_proj"]},
    "save_part_of_merged": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["k_proj"]},
    "save_layer": {"r": 4, "target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": ["layers.1"]},
    "lora_on_embedding": {"r": 4, "target_modules": ["embed_tokens"]},
    "lora_on_head": {"r": 4, "target_modules": ["lm_head"]},
    "lora_on_both_ends": {**ALL, "target_modules": [*EVERY, "embed_tokens", "lm_head"]},
    "dora_on_embedding": {"r": 4, "target_modules": ["embed_tokens"], "use_dora": True},
    "dora_on_both_ends": {**ALL, "target_modules": [*EVERY, "embed_tokens", "lm_head"], "use_dora": True},
    "lora_on_embedding_save_head": {"r": 4, "target_modules": ["embed_tokens", "q_proj"],
                                    "modules_to_save": ["lm_head"]},
    "embedding_rslora_patterns": {"r": 4, "target_modules": ["embed_tokens", "v_proj"], "use_rslora": True,
                                  "rank_pattern": {"embed_tokens": 9}, "alpha_pattern": {"embed_tokens": 3}},
    "tokens": {**ATTN, "trainable_token_indices": [30, 4, 5, 96, 0]},
    "tokens_of_embedding": {**ATTN, "trainable_token_indices": {"embed_tokens": [3, 50, 7, 8, 9]}},
    "tokens_of_head": {**ATTN, "trainable_token_indices": {"lm_head": [3, 50, 7, 8, 9]}},
    "tokens_of_both": {**ATTN, "trainable_token_indices": {"embed_tokens": [3, 50], "lm_head": [60, 7, 8]}},
    "tokens_and_saved_head": {**ATTN, "trainable_token_indices": [60, 20, 3], "modules_to_save": ["lm_head"]},
    "tokens_and_head_lora": {"r": 4, "target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [60, 20]},
    "tokens_dora": {**ALL, "use_dora": True, "trainable_token_indices": [60, 20]},
    "regex": {"r": 4, "target_modules": r".*\.(q|v)_proj"},
    "regex_of_layer": {"r": 4, "target_modules": r"model\.layers\.1\..*(up|o)_proj$"},
    "full_names": {"r": 4, "target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]},
    "suffix_of_one_layer": {"r": 4, "target_modules": ["0.self_attn.q_proj"]},
    "all_linear": {"r": 4, "target_modules": "all-linear"},
    "all_linear_dora": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    "all_linear_but": {"r": 4, "target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "targets_within_saved": {**ALL, "modules_to_save": ["mlp"]},
    "exclude_list": {**ALL, "exclude_modules": ["q_proj", "layers.0.mlp.up_proj"]},
    "exclude_regex": {**ALL, "exclude_modules": r".*layers\.0\..*"},
    "one_layer": {**ALL, "layers_to_transform": 1},
    "layer_list": {**ALL, "layers_to_transform": [0]},
    "layers_pattern": {**ALL, "layers_to_transform": [1], "layers_pattern": "layers"},
    "layers_pattern_list": {**ALL, "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    "saved_only": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["mlp", "norm", "lm_head", "embed_tokens"]},
}  # fmt: skip

BIASED: dict[str, dict[str, Any]] = {
    "bias_all": {**ALL, "bias": "all"},
    "bias_all_few_targets": {"r": 2, "target_modules": ["q_proj"], "bias": "all"},
    "bias_lora_only": {**ALL, "bias": "lora_only"},
    "bias_lora_only_few": {"r": 2, "target_modules": ["k_proj", "down_proj"], "bias": "lora_only"},
    "bias_lora_only_regex": {"r": 2, "target_modules": r".*\.0\..*k_proj", "bias": "lora_only"},
    "bias_all_dora": {**ALL, "bias": "all", "use_dora": True},
    "bias_lora_only_dora_rslora": {**ALL, "bias": "lora_only", "use_dora": True, "use_rslora": True},
    "dora": {**ALL, "use_dora": True},
    "lora_bias": {**ALL, "lora_bias": True},
    "save_linear": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["k_proj", "down_proj"]},
    "save_mlp_bias_all": {**ATTN, "modules_to_save": ["mlp"], "bias": "all"},
}

TIED: dict[str, dict[str, Any]] = {
    "attention": ATTN,
    "all_linear": {"r": 4, "target_modules": "all-linear"},
    "save_head": {**ATTN, "modules_to_save": ["lm_head"]},
    "save_embedding": {**ATTN, "modules_to_save": ["embed_tokens"]},
    "save_both": {**ATTN, "modules_to_save": ["embed_tokens", "lm_head"]},
    "save_embedding_tied": {**ATTN, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "save_head_tied": {**ATTN, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "save_both_tied": {**ATTN, "modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
    "save_mlp_tied": {**ATTN, "modules_to_save": ["mlp"], "ensure_weight_tying": True},
    "lora_on_embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "lora_on_head": {"r": 4, "target_modules": ["lm_head"]},
    "lora_on_both": {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
    "lora_on_embedding_tied": {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "lora_on_head_tied": {"r": 4, "target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True},
    "lora_on_both_tied": {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "lora_on_both_tied_rslora": {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True,
                                 "use_rslora": True, "alpha_pattern": {"embed_tokens": 3}},
    "lora_on_embedding_tied_rank": {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True,
                                    "rank_pattern": {"embed_tokens": 9}},
    "lora_on_regex_tied": {"r": 4, "target_modules": r".*(embed_tokens|q_proj)", "ensure_weight_tying": True},
    "lora_on_longer_regex_tied": {"r": 4, "target_modules": r"model\.(embed_tokens|.*q_proj)",
                                  "ensure_weight_tying": True},
    "lora_on_embedding_save_head_tied": {"r": 4, "target_modules": ["q_proj", "v_proj"],
                                         "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "dora_on_embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "dora_on_both": {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "tokens": {**ATTN, "trainable_token_indices": [30, 4, 5, 96]},
    "tokens_of_embedding": {**ATTN, "trainable_token_indices": {"embed_tokens": [30, 4, 5]}},
    "tokens_of_head": {**ATTN, "trainable_token_indices": {"lm_head": [30, 4, 5]}},
    "tokens_of_both": {**ATTN, "trainable_token_indices": {"embed_tokens": [30, 4], "lm_head": [30, 4]}},
    "tokens_of_both_differing": {**ATTN, "trainable_token_indices": {"embed_tokens": [30, 4], "lm_head": [60, 5, 6]}},
    "tokens_tied": {**ATTN, "trainable_token_indices": [30, 4, 5], "ensure_weight_tying": True},
}  # fmt: skip

OPT_ALL = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
OPT: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "every": {"r": 5, "target_modules": OPT_ALL, "lora_alpha": 3},
    "all_linear": {"r": 4, "target_modules": "all-linear"},
    "bias_all": {"r": 4, "target_modules": ["q_proj"], "bias": "all"},
    "bias_lora_only": {"r": 4, "target_modules": ["k_proj", "fc1"], "bias": "lora_only"},
    "bias_all_dora": {"r": 4, "target_modules": OPT_ALL, "bias": "all", "use_dora": True},
    "dora": {"r": 4, "target_modules": OPT_ALL, "use_dora": True},
    "lora_bias": {"r": 4, "target_modules": OPT_ALL, "lora_bias": True},
    "save_norms": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["final_layer_norm"]},
    "save_attention": {"r": 4, "target_modules": ["fc1"], "modules_to_save": ["self_attn"]},
    "save_head": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "save_embedding": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "save_embedding_tied": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"],
                            "ensure_weight_tying": True},
    "lora_on_embedding": {"r": 4, "target_modules": ["embed_tokens", "fc2"]},
    "lora_on_embedding_tied": {"r": 4, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "dora_on_embedding": {"r": 4, "target_modules": ["embed_tokens"], "use_dora": True},
    "lora_on_head": {"r": 4, "target_modules": ["lm_head"]},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 9, 90]},
    "one_layer": {"r": 4, "target_modules": ["fc1", "q_proj"], "layers_to_transform": 1},
    "layers_pattern": {"r": 4, "target_modules": OPT_ALL, "layers_to_transform": [0], "layers_pattern": "layers"},
    "fan_in_fan_out": {"r": 4, "target_modules": ["q_proj"], "fan_in_fan_out": True},
}  # fmt: skip
OPT_PROJECTED: dict[str, dict[str, Any]] = {
    "projections": {"r": 4, "target_modules": ["project_in", "project_out"]},
    "all_linear": {"r": 4, "target_modules": "all-linear"},
    "lora_on_embedding_tied": {"r": 4, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"r": 4, "target_modules": ["project_in"], "trainable_token_indices": [3, 9, 90]},
}
OPT_POST: dict[str, dict[str, Any]] = {
    "save_norms": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["final_layer_norm"]},
    "every": {"r": 4, "target_modules": OPT_ALL, "bias": "all"},
}

GPT2_ALL = ["c_attn", "c_proj", "c_fc"]
GPT2: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True},
    "wrong_fan": {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": False},
    "every": {"r": 9, "target_modules": GPT2_ALL, "fan_in_fan_out": True},
    "two_c_proj": {"r": 4, "target_modules": ["mlp.c_proj"], "fan_in_fan_out": True},
    "all_linear": {"r": 4, "target_modules": "all-linear", "fan_in_fan_out": True},
    "all_linear_wrong_fan": {"r": 4, "target_modules": "all-linear"},
    "dora": {"r": 4, "target_modules": GPT2_ALL, "use_dora": True, "fan_in_fan_out": True},
    "bias_all": {"r": 4, "target_modules": ["c_fc"], "bias": "all", "fan_in_fan_out": True},
    "bias_lora_only": {"r": 4, "target_modules": ["c_fc", "c_attn"], "bias": "lora_only", "fan_in_fan_out": True},
    "bias_all_dora": {"r": 4, "target_modules": GPT2_ALL, "bias": "all", "use_dora": True, "fan_in_fan_out": True},
    "lora_bias": {"r": 4, "target_modules": GPT2_ALL, "lora_bias": True, "fan_in_fan_out": True},
    "save_mlp": {"r": 4, "target_modules": ["c_attn"], "modules_to_save": ["mlp"], "fan_in_fan_out": True},
    "save_conv": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["c_attn"], "fan_in_fan_out": True},
    "save_norms": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["ln_1", "ln_f"], "fan_in_fan_out": True},
    "save_norm_bias_all": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["ln_1"], "bias": "all",
                           "fan_in_fan_out": True},
    "save_wpe": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["wpe"], "fan_in_fan_out": True},
    "save_wte": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["wte"], "fan_in_fan_out": True},
    "save_wte_tied": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["wte"], "ensure_weight_tying": True,
                      "fan_in_fan_out": True},
    "save_head": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True},
    "lora_on_wte": {"r": 4, "target_modules": ["wte"]},
    "lora_on_wte_tied": {"r": 4, "target_modules": ["wte", "c_fc"], "ensure_weight_tying": True,
                         "fan_in_fan_out": True},
    "lora_on_wpe": {"r": 4, "target_modules": ["wpe", "c_attn"], "fan_in_fan_out": True},
    "dora_on_wpe": {"r": 4, "target_modules": ["wpe", "wte"], "use_dora": True},
    "lora_on_head": {"r": 4, "target_modules": ["lm_head", "c_attn"], "fan_in_fan_out": True},
    "dora_on_head": {"r": 4, "target_modules": ["lm_head", "c_attn"], "use_dora": True},
    "tokens": {"r": 4, "target_modules": ["c_attn"], "trainable_token_indices": [4, 90, 7], "fan_in_fan_out": True},
    "tokens_of_wte": {"r": 4, "target_modules": ["c_attn"], "trainable_token_indices": {"wte": [4, 90, 7]},
                      "fan_in_fan_out": True},
    "tokens_of_wpe": {"r": 4, "target_modules": ["c_attn"], "trainable_token_indices": {"wpe": [0, 5, 9, 20]},
                      "fan_in_fan_out": True},
    "one_layer": {"r": 4, "target_modules": GPT2_ALL, "layers_to_transform": 1, "fan_in_fan_out": True},
    "layers_pattern": {"r": 4, "target_modules": GPT2_ALL, "layers_to_transform": [0], "layers_pattern": "h",
                       "fan_in_fan_out": True},
    "rank_pattern": {"r": 4, "target_modules": GPT2_ALL, "rank_pattern": {"attn.c_proj": 3, r"h\.0\..*c_proj": 7},
                     "alpha_pattern": {"^transformer.h.1.*": 3}, "fan_in_fan_out": True},
}  # fmt: skip
GPT2_UNTIED: dict[str, dict[str, Any]] = {
    "lora_on_wte": {"r": 4, "target_modules": ["wte"]},
    "tokens": {"r": 4, "target_modules": ["c_attn"], "trainable_token_indices": [4, 90, 7], "fan_in_fan_out": True},
    "save_head_and_wte": {"r": 4, "target_modules": ["c_fc"], "modules_to_save": ["lm_head", "wte"],
                          "fan_in_fan_out": True},
    "ensure_without_ties": {"r": 4, "target_modules": ["wte", "c_fc"], "ensure_weight_tying": True},
}  # fmt: skip

QWEN2: dict[str, dict[str, Any]] = {
    "bias_all_dora": {**ALL, "bias": "all", "use_dora": True},
    "bias_lora_only": {"r": 4, "target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "tokens": {**ATTN, "trainable_token_indices": [30, 4, 5, 96]},
}

BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS: list[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]] = [
    ("LlamaForCausalLM", "gqa", {}, LLAMA),
    ("LlamaForCausalLM", "mha", BIASES, BIASED),
    ("LlamaForCausalLM", "tied", {}, TIED),
    ("Qwen2ForCausalLM", "tied", {}, QWEN2),
    ("OPTForCausalLM", "pre_norm", {}, OPT),
    ("OPTForCausalLM", "projected", {}, OPT_PROJECTED),
    ("OPTForCausalLM", "post_norm", {}, OPT_POST),
    ("GPT2LMHeadModel", "gelu_new", {}, GPT2),
    ("GPT2LMHeadModel", "untied", {}, GPT2_UNTIED),
]
CASES = [
    pytest.param(architecture, variant, settings, fields, id=f"{architecture}-{variant}-{name}")
    for architecture, variant, settings, table in MODELS
    for name, fields in table.items()
]


@pytest.mark.parametrize(("architecture", "variant", "settings", "fields"), CASES)
def test_a_field_does_what_it_does_in_peft(
    worlds: Worlds, architecture: str, variant: str, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    world = worlds(architecture, variant, **settings)
    assert world.agree(world.train(LoraConfig(**fields), seed=len(fields)))


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("LlamaForCausalLM", "gqa"), ("LlamaForCausalLM", "tied"), ("OPTForCausalLM", "projected"),
     ("GPT2LMHeadModel", "gelu_new")],
)  # fmt: skip
@pytest.mark.parametrize("written", ["all-linear", "ALL-linear"])
def test_all_linear_in_the_file_itself(worlds: Worlds, architecture: str, variant: str, written: str) -> None:
    """PEFT writes the names that it found; a file may say "all-linear" all the same."""
    world = worlds(architecture, variant)
    path = world.train(LoraConfig(r=3, target_modules="all-linear"), target_modules=written)
    assert json.loads((path / "adapter_config.json").read_text())["target_modules"] == written
    assert world.agree(path)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("target", [["c_attn", "c_fc"], ["lm_head"], ["lm_head", "c_proj"]])
def test_fan_in_fan_out_in_the_file_itself(worlds: Worlds, target: list[str], written: bool) -> None:
    """PEFT corrects the field by the kind of each layer: what is written does not matter."""
    world = worlds("GPT2LMHeadModel", "gelu_new")
    path = world.train(LoraConfig(r=3, target_modules=target, use_dora=True), fan_in_fan_out=written)
    assert world.agree(path)


def test_a_head_that_peft_forgets_is_refused(worlds: Worlds) -> None:
    """For a tied GPT-2, PEFT trains and saves a LoRA on lm_head as asked, and leaves it out when it reads the file: its
    configuration then names the embedding only. There is no telling which of the two was meant."""
    world = worlds("GPT2LMHeadModel", "gelu_new")
    path = world.train(LoraConfig(r=4, target_modules=["lm_head", "c_fc"], ensure_weight_tying=True))
    with pytest.raises(AdapterError, match=r"lm_head\.lora_A\.weight \(the configuration does not target it\)"):
        world.load(path)


def test_a_short_config_has_peft_s_defaults(worlds: Worlds) -> None:
    """r and lora_alpha are 8 where the file does not say."""
    world = worlds("LlamaForCausalLM", "gqa")
    path = world.train(LoraConfig(target_modules=["q_proj", "v_proj"]))
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}')
    assert world.agree(path)


def test_embeddings_saved_beside_their_lora_replace_the_base_s(worlds: Worlds) -> None:
    """save_embedding_layers writes base_layer.weight; PEFT loads it, whatever it holds."""
    world = worlds("LlamaForCausalLM", "gqa")
    for number, targets in enumerate([["embed_tokens"], ["embed_tokens", "lm_head"], ["lm_head"]]):
        for dora in (False, True):
            path = world.train(LoraConfig(r=4, target_modules=targets, use_dora=dora), seed=number)
            tensors = load_file(path / "adapter_model.safetensors")
            layers = [name for name in tensors if name.endswith("base_layer.weight")]
            assert len(layers) == len(targets)
            for name in layers:
                tensors[name] += 0.2 * torch.randn_like(tensors[name])
            save_file(tensors, path / "adapter_model.safetensors")
            assert world.agree(path)


def test_what_save_embedding_layers_writes_beside_saved_tables(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT then writes a saved module three times: as what replaces the base's, twice, and as the base's."""
    monkeypatch.setattr("quire.lora.binding._MOST_UNUSED", 8)  # the tables are small
    world = worlds("LlamaForCausalLM", "gqa")
    path = world.train(LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))
    tensors = load_file(path / "adapter_model.safetensors")
    tables = [name for name in tensors if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert len(tables) == 2
    for name in tables:
        module = name.removesuffix(".weight")
        tensors[f"{module}.modules_to_save.weight"] = tensors[name].clone()
        tensors[f"{module}.original_module.weight"] = torch.randn_like(tensors[name])
    save_file(tensors, path / "adapter_model.safetensors")
    assert world.agree(path)
    tensors[f"{module}.original_module.weight"] = torch.zeros(2 * tensors[name].shape[0], tensors[name].shape[1])
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="original_module"):
        world.agree(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_files_in_another_dtype(worlds: Worlds, dtype: torch.dtype) -> None:
    """Weights are what they are in the file; the model's dtype is that of the arithmetic."""
    world = worlds("LlamaForCausalLM", "gqa")
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], use_dora=True)
    path = world.train(config)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "adapter_model.safetensors").items()}
    save_file(tensors, path / "adapter_model.safetensors")
    edit(path, lora_dropout=0.1, inference_mode=True)
    assert world.agree(path)
