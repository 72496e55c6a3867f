"""Mixtral: mistralai/Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1 and their Instruct versions."""

from tests.models.rows.row import SIZES, ModelRow, rope

# What of a mixture of experts PEFT's "all-linear" and patterns name by itself.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

ROWS = (
    ModelRow(
        "MixtralForCausalLM",
        "MixtralConfig",
        base={**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": None},
        quick=("as_published",),
        variants={
            "as_published": rope("default", rope_theta=1e6),
            "window": {"sliding_window": 9},
            "three_of_five": {"num_local_experts": 5, "num_experts_per_tok": 3},
            "one_expert": {"num_local_experts": 1, "num_experts_per_tok": 1},
            "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
            "odd_sizes": {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10, "hidden_act": "gelu"},
        },
        linears=ATTENTION,
    ),
)
