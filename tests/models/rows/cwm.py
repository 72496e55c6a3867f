"""CWM: facebook/cwm."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "CwmForCausalLM",
        "CwmConfig",
        base={**SIZES, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 5},
        quick=("as_published",),
        variants={
            "as_published": rope("llama3", rope_theta=1e6, factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=32),
            "other_layers": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
            "window_of_one": {"sliding_window": 1, "mlp_bias": True, "num_hidden_layers": 3, **rope("default")},
            "past_the_prompt": {"sliding_window": 64, "num_hidden_layers": 3, **rope("default")},
            "mqa": {"num_key_value_heads": 1, "sliding_window": 5, "num_hidden_layers": 3, **rope("linear", factor=2)},
            "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2, "num_hidden_layers": 3, **rope("default")},
        },
    ),
)  # fmt: skip
