"""Mistral: mistralai/Mistral-7B-v0.1 (windows), v0.3 (none), Nemo (heads of another size)."""

from tests.models.rows.row import ModelRow, rope

ROWS = (
    ModelRow(
        "MistralForCausalLM",
        "MistralConfig",
        quick=("window", "full"),
        variants={
            "window": {"sliding_window": 8},
            "full": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "window_of_one": {"sliding_window": 1},
            "window_past_the_prompt": {"sliding_window": 64},
            "head_dim_apart": {"sliding_window": None, "head_dim": 16},
            "mqa": {"sliding_window": 5, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
            "tied": {"sliding_window": 13, "tie_word_embeddings": True},
            "yarn": {"sliding_window": None, **rope("yarn", factor=4.0, original_max_position_embeddings=32)},
        },
    ),
)
