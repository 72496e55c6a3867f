"""Cohere: CohereLabs/aya-23-8B, c4ai-command-r-v01 and -plus (norms of heads), c4ai-command-r7b-12-2024 (Cohere 2)."""

from tests.models.rows.row import SIZES, ModelRow, rope

TIED = {**SIZES, "tie_word_embeddings": True}
ROWS = (
    ModelRow(
        "CohereForCausalLM",
        "CohereConfig",
        base=TIED,
        quick=("as_published", "qk_norm"),
        gain=4.0,
        variants={
            "as_published": {"num_key_value_heads": 4, "logit_scale": 0.0625, **rope("default", rope_theta=8e6)},
            "qk_norm": {"use_qk_norm": True, "logit_scale": 0.8333333333333334},
            "untied": {"tie_word_embeddings": False, "logit_scale": 1.0},
            "biases": {"attention_bias": True},
            "epsilon": {"layer_norm_eps": 1e-2, "num_key_value_heads": 1},
            "rope_linear": rope("linear", factor=2.0),
        },
        adapted={"tie_word_embeddings": False},
    ),
    ModelRow(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        base={**TIED, "sliding_window": 8, "num_hidden_layers": 4},
        quick=("as_published",),
        gain=4.0,
        variants={
            "as_published": {"logit_scale": 0.25, **rope("default", rope_theta=50000.0)},
            "pattern_of_two": {"sliding_window_pattern": 2, "sliding_window": 5},
            "other_layers": {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            "untied": {"tie_word_embeddings": False},
            "biases": {"attention_bias": True, "num_key_value_heads": 4},
            "epsilon": {"layer_norm_eps": 1e-2, "num_key_value_heads": 1},
        },
        adapted={"tie_word_embeddings": False},
    ),
)
