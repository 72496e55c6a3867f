"""Phi-3.5-MoE: microsoft/Phi-3.5-MoE-instruct."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

# Heads have eight dimensions: four frequencies. Transformers turns by the short ones at any length.
_LONGROPE = rope(
    "longrope", short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.5, 2.0, 3.0, 4.5], short_mscale=1.243,
    long_mscale=1.243, original_max_position_embeddings=128,
)  # fmt: skip

ROWS = (
    ModelRow(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        base={**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2},
        quick=("as_published",),
        variants={
            "as_published": {"num_local_experts": 16, "attention_bias": True, "lm_head_bias": True,
                             "max_position_embeddings": 256, **_LONGROPE},
            "no_bias": rope("default", rope_theta=1e4),
            "wide_tolerance": {"router_jitter_noise": 0.5},
            "no_tolerance": {"router_jitter_noise": 0.0, "num_local_experts": 3},
            "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
            "eps": {"rms_norm_eps": 1e-2, "hidden_act": "gelu"},
        },
        linears=ATTENTION,
        not_linear=("router",),
    ),
)  # fmt: skip
