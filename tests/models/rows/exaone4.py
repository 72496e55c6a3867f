"""Exaone 4: LGAI-EXAONE/EXAONE-4.0-1.2B (no windows) and -32B."""

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
    ),
)
