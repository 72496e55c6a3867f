"""OLMo 1, 2 and 3: allenai/OLMo-7B-hf, OLMo-1.7-7B-hf (clip_qkv), OLMo-2-1124-7B, Olmo-3-7B."""

from tests.models.rows.row import SIZES, ModelRow, rope

YARN = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16,
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
ROWS = (
    ModelRow(
        "OlmoForCausalLM",
        "OlmoConfig",
        quick=("as_published", "clip"),
        saved=(),
        variants={
            "as_published": {"num_key_value_heads": 4},
            "clip": {"clip_qkv": 1.5},
            "clip_as_published": {"clip_qkv": 8.0},
            "gqa": {},
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True, **rope("linear", factor=2.0)},
        },
    ),
    ModelRow(
        "Olmo2ForCausalLM",
        "Olmo2Config",
        quick=("as_published",),
        saved=("q_norm",),
        gain=4.0,
        variants={
            "as_published": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, **rope("default", rope_theta=5e5)},
            "gqa": {},
            "mqa": {"num_key_value_heads": 1},
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True},
            "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
        },
    ),
    ModelRow(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        base={**SIZES, "sliding_window": 8, "num_hidden_layers": 4},
        quick=("as_published",),
        gain=4.0,
        variants={
            "as_published": {"num_key_value_heads": 4, "rope_parameters": YARN},
            "one_rope": {},
            "other_layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "mqa": {"num_key_value_heads": 1, "sliding_window": 5},
            "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
            "biases": {"attention_bias": True},
        },
    ),
)
