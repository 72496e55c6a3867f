"""Qwen3: Qwen/Qwen3-0.6B and its like."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        base={**SIZES, "head_dim": 16},
        quick=("head_dim_apart", "window"),
        variants={
            "head_dim_apart": {},
            "window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
            "attention_bias": {"attention_bias": True},
            "mha": {"num_key_value_heads": 4, "head_dim": 8},
            "mqa": {"num_key_value_heads": 1},
            "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
            "odd_sizes": {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10, "vocab_size": 101},
        },
    ),
)
