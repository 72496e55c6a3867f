"""DeepSeek: deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V2; DeepSeek-V3 and -R1, moonshotai/Moonlight-16B-A3B."""

from tests.models.rows.row import SIZES, ModelRow, rope

# Of latent attention; a key's part that turns has four frequencies.
LATENT = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
LATENT_LINEARS = ("q_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ODD_SIZES = {
    "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 21, "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6, "v_head_dim": 7, "hidden_act": "gelu",
}  # fmt: skip
_EXPERTS = {
    **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip


def yarn(mscale: float, mscale_all_dim: float) -> dict[str, object]:
    return rope("yarn", factor=40.0, beta_fast=32, beta_slow=1, original_max_position_embeddings=16, mscale=mscale,
                mscale_all_dim=mscale_all_dim)  # fmt: skip


ROWS = (
    ModelRow(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        base=_EXPERTS,
        quick=("lite", "v2"),
        variants={
            "lite": {"q_lora_rank": None, **yarn(0.707, 0.707)},
            "v2": {"topk_method": "group_limited_greedy", "n_routed_experts": 16, "n_group": 8, "topk_group": 3,
                   "num_experts_per_tok": 6, "routed_scaling_factor": 16.0, **yarn(0.707, 0.707)},
            "mscale_apart": yarn(0.8, 1.3),
            "biases": {"attention_bias": True, "mlp_bias": True, "routed_scaling_factor": 1.5},
            "no_dense_layer_tied": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
            "dense_layers": {"first_k_dense_replace": 3, "v_head_dim": 16},
            "odd_sizes": {**ODD_SIZES, "q_lora_rank": None},
        },
        linears=("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
    ModelRow(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        base={**_EXPERTS, "n_group": 4, "topk_group": 2},
        quick=("v3", "moonlight"),
        variants={
            "v3": {"n_routed_experts": 16, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
                   "n_shared_experts": 1, **yarn(1.0, 1.0)},
            "moonlight": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
                          "rms_norm_eps": 1e-5, **rope("default", rope_theta=50000.0)},
            "halves": {"rope_interleave": False, "routed_scaling_factor": 1.0},
            "not_renormalised": {"norm_topk_prob": False, "attention_bias": True},
            "no_dense_layer_tied": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
            "dense_layers": {"first_k_dense_replace": 3, "n_shared_experts": 1},
            "odd_sizes": ODD_SIZES,
        },
        linears=LATENT_LINEARS,
    ),
)  # fmt: skip
