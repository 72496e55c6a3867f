"""Apertus: swiss-ai/Apertus-8B-Instruct-2509."""

from tests.models.rows.row import SIZES, ModelRow, rope

LLAMA3 = rope("llama3", factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=16)
ROWS = (
    ModelRow(
        "ApertusForCausalLM",
        "ApertusConfig",
        base={**SIZES, **LLAMA3},
        quick=("as_published",),
        linears=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
        saved=("attention_layernorm",),
        variants={
            "as_published": {},
            "default_rope": rope("default", rope_theta=12e6),
            "biases": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
            "relu2": {"hidden_act": "relu2"},
            "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        },
    ),
)
