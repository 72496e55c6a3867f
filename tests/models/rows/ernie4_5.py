"""Ernie 4.5's dense models: baidu/ERNIE-4.5-0.3B-PT."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "Ernie4_5ForCausalLM",
        "Ernie4_5Config",
        base={**SIZES, "head_dim": 16},
        quick=("as_published",),
        variants={
            "as_published": {"tie_word_embeddings": True, **rope("default", rope_theta=5e5)},
            "biases": {"use_bias": True},
            "untied": {},
            "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
            "mha": {"num_key_value_heads": 4, "head_dim": 8},
            "rope_linear": rope("linear", factor=2.0),
        },
        adapted={"tie_word_embeddings": False},
    ),
)
