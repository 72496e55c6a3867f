"""Arcee: arcee-ai/AFM-4.5B."""

from tests.models.rows.row import ModelRow, rope

YARN = rope("yarn", factor=20.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0)

ROWS = (
    ModelRow(
        "ArceeForCausalLM",
        "ArceeConfig",
        quick=("as_published",),
        linears=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
        variants={
            "as_published": {"hidden_act": "relu2", **YARN, "max_position_embeddings": 160},
            "default_rope": {"hidden_act": "relu2"},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
            "gelu": {"hidden_act": "gelu"},
            "mha": {"num_key_value_heads": 4, "head_dim": 16},
        },
    ),
)
