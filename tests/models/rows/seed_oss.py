"""Seed-OSS: ByteDance-Seed/Seed-OSS-36B-Instruct."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "SeedOssForCausalLM",
        "SeedOssConfig",
        base={**SIZES, "head_dim": 16},
        quick=("as_published",),
        variants={
            "as_published": {"attention_bias": True, "attention_out_bias": False, **rope("default", rope_theta=1e7)},
            "out_bias": {"attention_bias": False, "attention_out_bias": True},
            "all_biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
            "no_bias": {"attention_bias": False, "attention_out_bias": False},
            "mqa": {"num_key_value_heads": 1},
            "tied": {"tie_word_embeddings": True},
        },
    ),
)
