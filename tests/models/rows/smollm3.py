"""SmolLM3: HuggingFaceTB/SmolLM3-3B. Every fourth layer does not rotate."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        base={**SIZES, "num_hidden_layers": 4},
        quick=("as_published", "window"),
        variants={
            "as_published": {"tie_word_embeddings": True, **rope("default", rope_theta=5e6)},
            "window": {"use_sliding_window": True, "sliding_window": 8},
            "untied": {},
            "other_layers": {"no_rope_layers": [0, 1, 1, 0]},
            "all_rotate": {"no_rope_layers": [1, 1, 1, 1]},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "yarn": rope("yarn", factor=2.0, original_max_position_embeddings=64),
        },
        adapted={"tie_word_embeddings": False},
    ),
)
