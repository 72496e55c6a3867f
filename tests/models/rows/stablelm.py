"""StableLM: stabilityai/stablelm-3b-4e1t, stablelm-2-1_6b (biases), stablelm-2-12b (norms of heads, parallel)."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "StableLmForCausalLM",
        "StableLmConfig",
        base={**SIZES, "partial_rotary_factor": 0.25},
        quick=("as_published", "qk_layernorm"),
        gain=4.0,
        variants={
            "as_published": {"num_key_value_heads": 4, "use_qkv_bias": True},
            "parallel": {"use_parallel_residual": True},
            "qk_layernorm": {"qk_layernorm": True, "use_parallel_residual": True},
            "qk_layernorm_in_turn": {"qk_layernorm": True, "use_qkv_bias": True},
            "rotates_half": rope("default", partial_rotary_factor=0.5),
            "tied": {"tie_word_embeddings": True, "layer_norm_eps": 1e-2},
            "mqa": {"num_key_value_heads": 1},
        },
    ),
)
