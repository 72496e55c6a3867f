"""Ministral 3: mistralai/Ministral-3-8B-Base-2512, the text model; Devstral 2."""

from typing import Any

from tests.models.rows.row import ModelRow, rope


def scaled(beta: float, original: int, rope_type: str = "yarn", **more: Any) -> dict[str, Any]:
    return rope(rope_type, llama_4_scaling_beta=beta, original_max_position_embeddings=original, **more)


_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

ROWS = (
    ModelRow(
        "Ministral3ForCausalLM",
        "Ministral3Config",
        quick=("ministral", "window"),
        variants={
            "ministral": {"head_dim": 16, **scaled(0.1, 16, factor=8.0, max_position_embeddings=128, **_YARN)},
            "window": {"head_dim": 8, "sliding_window": 8, **scaled(0.7, 5, factor=4.0)},
            "devstral": {
                "head_dim": 8,
                **scaled(0.0, 32, factor=4.0, **{**_YARN, "beta_fast": 4.0, "mscale_all_dim": 0.0}),
            },
            "default_rope": {"head_dim": 8, **scaled(1.5, 7, "default")},
            "past_the_prompt": {"head_dim": 16, "num_key_value_heads": 1, **scaled(0.1, 120, factor=2.0)},
            "tied": {"head_dim": 8, "tie_word_embeddings": True, **scaled(-0.2, 10, "linear", factor=2.0)},
        },
    ),
)
