"""Qwen's mixtures of experts: Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, Qwen3-30B-A3B, Qwen3-235B-A22B."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

_BASE = {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

ROWS = (
    ModelRow(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        base={**_BASE, "shared_expert_intermediate_size": 40},
        gain=2.0,
        quick=("as_published",),
        variants={
            "as_published": {"num_key_value_heads": 4, "num_experts": 15, "num_experts_per_tok": 4,
                             **rope("default", rope_theta=1e6)},
            "renormalised": {"norm_topk_prob": True},
            "every_second_layer": {"decoder_sparse_step": 2},
            "dense_layers": {"mlp_only_layers": [1], "qkv_bias": False},
            "windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            "tied_mqa": {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu"},
        },
        linears=ATTENTION,
    ),
    ModelRow(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        base={**_BASE, "head_dim": 16, "norm_topk_prob": True},
        quick=("as_published",),
        variants={
            "as_published": {"num_experts": 16, "num_experts_per_tok": 8, **rope("default", rope_theta=1e6)},
            "not_renormalised": {"norm_topk_prob": False},
            "every_second_layer": {"decoder_sparse_step": 2, "attention_bias": True},
            "dense_layers": {"mlp_only_layers": [0, 2]},
            "window": {"use_sliding_window": True, "sliding_window": 9},
            "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
        },
        linears=ATTENTION,
    ),
)  # fmt: skip
