"""Values of families' own fields that make no sense are refused by the field's name, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from quire import registry
from quire.errors import UnsupportedModelError
from tests.models.rows import all_rows


def config_of(architecture: str, settings: dict[str, Any]) -> Any:
    row = all_rows()[architecture]
    kind: Any = registry.config_class([architecture]) or getattr(transformers, row.config)
    config = kind(**{**row.base, **row.variants[row.first]})
    vars(config).update(settings)  # past transformers' checks of types
    return config


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 .*there are num_local_experts=8"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 .*from 1"),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts=0 .*from 1"),
        ("GptOssForCausalLM", {"num_local_experts": 2.0}, "num_local_experts=2.0"),
        ("GptOssForCausalLM", {"swiglu_limit": "x"}, "swiglu_limit='x' .*a finite number"),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": -4}, "shared_expert_intermediate_size=-4"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        ("Ernie4_5_MoeForCausalLM", {"moe_k": 99}, "moe_k=99 .*there are moe_num_experts=16"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 0}, "moe_layer_interval=0"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling=0 .*other than 0"),
        ("GraniteForCausalLM", {"residual_multiplier": float("inf")}, "residual_multiplier=inf"),
        ("GraniteMoeForCausalLM", {"embedding_multiplier": None}, "embedding_multiplier=None .*a number"),
        ("GraniteMoeHybridForCausalLM", {"residual_multiplier": None}, "residual_multiplier=None .*a number"),
        ("GraniteMoeForCausalLM", {"attention_multiplier": None}, "attention_multiplier=None .*a number"),
        ("DeepseekV2ForCausalLM", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor=nan .*a finite"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1 .*above 0"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 .*above 0"),
        ("MiniCPMForCausalLM", {"scale_depth": "x"}, "scale_depth='x'"),
        ("MiniCPMForCausalLM", {"dim_model_base": 0}, "dim_model_base=0"),
        ("MiniCPMForCausalLM", {"sparse_config": {"kernel_size": 32}}, "sparse_config.*hf_overrides"),
        ("BaichuanForCausalLM", {"norm_head": True, "tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("HunYuanDenseV1ForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "alpha": "x"}}, "alpha .*='x'"),
        ("BloomForCausalLM", {"seq_length": 1.5}, "seq_length=1.5"),
        ("FalconH1ForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' .*'silu' alone"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers=.*5 finite numbers"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": 3}, "ssm_multipliers=3 .*5 finite numbers"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1, 1, 1, 1, float("inf")]}, "ssm_multipliers=.*5 finite numbers"),
        ("FalconH1ForCausalLM", {"mlp_multipliers": [1.0, float("nan")]}, "mlp_multipliers=.*2 finite numbers"),
        ("FalconH1ForCausalLM", {"key_multiplier": None}, "key_multiplier=None .*a finite number"),
        ("FalconH1ForCausalLM", {"key_multiplier": float("nan")}, "key_multiplier=nan .*a finite number"),
        ("FalconH1ForCausalLM", {"ssm_in_multiplier": float("inf")}, "ssm_in_multiplier=inf .*a finite number"),
        ("FalconH1ForCausalLM", {"time_step_limit": (1.0, 0.5)}, "time_step_limit"),
        ("FalconH1ForCausalLM", {"mamba_n_groups": 4}, "mamba_n_groups=4 .*mamba_n_heads=6"),
        ("FalconH1ForCausalLM", {"mamba_d_conv": 1}, "mamba_d_conv=1 .*from 2 to 16"),
        ("GraniteMoeHybridForCausalLM", {"mamba_d_state": 0}, "mamba_d_state=0 .*from 1"),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("GraniteMoeHybridForCausalLM", {"shared_intermediate_size": 0}, "shared_intermediate_size=0"),
        ("Glm4MoeForCausalLM", {"n_routed_experts": 2}, "num_experts_per_tok=8 .*there are n_routed_experts=2"),
        ("Dots1ForCausalLM", {"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1]}, "moe_topk.*a number for each layer"),
        ("HunYuanMoEV1ForCausalLM", {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe=False .*True"),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": [24, 48, 48]}, "moe_intermediate_size.*48"),
        ("ExaoneMoeForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types=.*for each layer"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "moe", "sparse"]}, "mlp_layer_types=.*dense, sparse"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": 3}, "mlp_layer_types=3"),
        ("Llama4ForCausalLM", {"floor_scale": None}, "floor_scale=None .*a number"),
        ("Llama4ForCausalLM", {"floor_scale": float("nan")}, "floor_scale=nan .*above 0"),
        ("Llama4ForCausalLM", {"attn_scale": None}, "attn_scale=None .*a number"),
        ("Llama4ForCausalLM", {"attn_scale": float("nan")}, "attn_scale=nan .*a finite number"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax' .*'sigmoid'"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(architecture: str, settings: dict[str, Any], named: str) -> None:
    kind = registry.resolve([architecture])
    kind.check_config(config_of(architecture, {}))
    with pytest.raises(UnsupportedModelError, match=named):
        kind.check_config(config_of(architecture, settings))
