"""Exaone 4: LGAI-EXAONE/EXAONE-4.0-1.2B (no windows) and -32B; K-EXAONE-236B-A23B."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

LLAMA3 = rope("llama3", factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=16)
ROWS = (
    ModelRow(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        base={**SIZES, "num_hidden_layers": 4, "sliding_window": 8},
        quick=("window", "full"),
        gain=4.0,
        variants={
            "window": LLAMA3,
            "full": {"sliding_window": None, "layer_types": ["full_attention"] * 4, "head_dim": 16, **LLAMA3},
            "other_layers": {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            "all_slide": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 5},
            "tied": {"tie_word_embeddings": True},
            "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        },
        adapted={"num_hidden_layers": 4},
    ),    ModelRow(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        base={**SIZES, "num_hidden_layers": 4, "sliding_window": 8, "head_dim": 16, "num_experts": 8,
              "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        quick=("window",),
        variants={
            "window": {"num_experts": 16, "num_experts_per_tok": 8, "sliding_window_pattern": "LLLG",
                       "layer_types": [*["sliding_attention"] * 3, "full_attention"],
                       **rope("default", rope_theta=1e6)},
            "no_rotation": {"layer_types": ["full_attention"] * 4},
            "all_slide": {"layer_types": ["sliding_attention"] * 4, **LLAMA3},
            "groups": {"n_group": 4, "topk_group": 2, "num_hidden_layers": 3, "sliding_window": 5},
            "not_renormalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "num_hidden_layers": 3},
            "other_layers": {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_hidden_layers": 3,
                             "layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "two_shared_mqa": {"num_shared_experts": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-2,
                               "num_hidden_layers": 3},
            "dense_tied": {"first_k_dense_replace": 3, "num_hidden_layers": 3, "tie_word_embeddings": True},
        },
        linears=ATTENTION,
    ),
)  # fmt: skip
