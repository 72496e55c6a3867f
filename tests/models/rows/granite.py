"""Granite: ibm-granite/granite-3.1-8b-instruct and its like; the numbers are theirs."""

from tests.models.rows.row import SIZES, ModelRow, rope

NUMBERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
ROWS = (
    ModelRow(
        "GraniteForCausalLM",
        "GraniteConfig",
        base={**SIZES, **NUMBERS},
        quick=("as_published", "tied"),
        gain=4.0,
        variants={
            "as_published": {},
            "tied": {"tie_word_embeddings": True, "logits_scaling": 16.0},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "all_one": dict.fromkeys(NUMBERS, 1.0),
            "no_scale_of_scores": {"logits_scaling": 1.0, "attention_multiplier": 0.0078125},
            "mqa": {"num_key_value_heads": 1, "residual_multiplier": 1.0},
            "rope": rope("default", rope_theta=1e7),
        },
    ),
)
