"""Helium: kyutai/helium-1-2b."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "HeliumForCausalLM",
        "HeliumConfig",
        base={**SIZES, "head_dim": 8},
        quick=("as_published",),
        variants={
            "as_published": {"num_key_value_heads": 4, "rms_norm_eps": 1e-8, **rope("default", rope_theta=1e5)},
            "gqa": {},
            "mqa": {"num_key_value_heads": 1},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
            "rope": rope("linear", factor=2.0),
        },
    ),
)
