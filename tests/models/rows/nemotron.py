"""Nemotron: nvidia/Minitron-4B-Base, Nemotron-4-340B."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "NemotronForCausalLM",
        "NemotronConfig",
        base={**SIZES, "partial_rotary_factor": 0.5},
        quick=("as_published",),
        linears=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
        gain=2.0,
        variants={
            "as_published": {"hidden_act": "relu2", "norm_eps": 1e-5},
            "whole_heads": rope("default", partial_rotary_factor=1.0),
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True, "norm_eps": 1e-2},
            "head_dim_apart": {"head_dim": 16},
            "mqa": {"num_key_value_heads": 1, "hidden_act": "silu"},
        },
    ),
)
