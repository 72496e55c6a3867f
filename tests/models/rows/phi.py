"""Phi-1, Phi-1.5 and Phi-2."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "PhiForCausalLM",
        "PhiConfig",
        base={**SIZES, "num_key_value_heads": None},
        variants={
            "phi_2": {"partial_rotary_factor": 0.4, "hidden_size": 80},
            "norms_of_heads": {"qk_layernorm": True},
            "phi_1": {"partial_rotary_factor": 0.5},
            "gqa": {"num_key_value_heads": 2},
            "tied": {"tie_word_embeddings": True},
            "relu": {"hidden_act": "relu", "layer_norm_eps": 1e-2},
            "linear": rope("linear", factor=2.0, partial_rotary_factor=0.5),
        },
        quick=("phi_2", "norms_of_heads"),
        linears=("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
        saved=("final_layernorm",),
    ),
)
