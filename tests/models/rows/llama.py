"""Llama, and every rotary type that transformers has."""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.rows.row import SIZES, ModelRow, rope

BASE = {name: SIZES[name] for name in SIZES if not name.endswith("_token_id")}
# head_dim of the Llama base is 8: four frequencies.
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.5]}
ROPE: dict[str, dict[str, Any]] = {
    "rope_default": rope("default", rope_theta=500.0),
    "rope_linear": rope("linear", factor=3.0),
    "rope_dynamic": rope("dynamic", factor=4.0) | {"max_position_embeddings": 24},
    "rope_yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "rope_yarn_mscale": rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=0.7,
        mscale_all_dim=1.2,
        truncate=False,
    ),
    "rope_yarn_attention_factor": rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3),
    "rope_longrope": rope("longrope", factor=4.0, original_max_position_embeddings=24, **LONGROPE),
    "rope_longrope_short": rope("longrope", factor=2.0, original_max_position_embeddings=64, **LONGROPE),
    "rope_llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "rope_proportional": rope("proportional", partial_rotary_factor=0.5),
}
# A type that a later transformers adds must fail a test here until it has a variant.
ROPE_TYPES_WITHOUT_VARIANT = set(ROPE_INIT_FUNCTIONS) - {v["rope_parameters"]["rope_type"] for v in ROPE.values()}

ROWS = (
    ModelRow(
        "LlamaForCausalLM",
        "LlamaConfig",
        base=BASE,
        quick=("gqa", "rope_dynamic"),
        by_length=frozenset({"rope_dynamic", "rope_longrope", "rope_longrope_short"}),
        token_by_token=frozenset({"gqa"}),
        variants={
            "gqa": {},
            "mqa": {"num_key_value_heads": 1},
            "mha": {"num_key_value_heads": 4},
            "head_dim_apart": {"head_dim": 16},
            "attention_bias": {"attention_bias": True},
            "mlp_bias": {"mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
            "gelu": {"hidden_act": "gelu"},
            "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
            "quick_gelu": {"hidden_act": "quick_gelu"},
            "relu": {"hidden_act": "relu"},
            "gelu_10": {"hidden_act": "gelu_10"},  # no kernel has it
            "eps": {"rms_norm_eps": 1e-2},
            "odd_sizes": {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10, "vocab_size": 101},
            **ROPE,
        },
    ),
)
