"""GLM-4 in transformers' form, and GLM-4-0414: zai-org/glm-4-9b-hf, GLM-4-9B-0414, GLM-4-32B-0414."""

from tests.models.rows.row import SIZES, ModelRow, rope

FUSED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
BASE = {**SIZES, "head_dim": 16, "partial_rotary_factor": 0.5}
VARIANTS = {
    "as_published": {"rms_norm_eps": 1.5625e-07, "attention_bias": True},
    "no_bias": {"attention_bias": False},
    "whole_heads": rope("default", partial_rotary_factor=1.0),
    "tied": {"tie_word_embeddings": True},
    "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "mha": {"num_key_value_heads": 4, "head_dim": 8},
}
ROWS = (
    ModelRow("GlmForCausalLM", "GlmConfig", base=BASE, variants=VARIANTS, quick=("as_published",), linears=FUSED),
    ModelRow(
        "Glm4ForCausalLM",
        "Glm4Config",
        base=BASE,
        variants=VARIANTS,
        quick=("as_published",),
        linears=FUSED,
        saved=("post_mlp_layernorm",),
    ),
)
