"""gpt-oss: openai/gpt-oss-20b and gpt-oss-120b, whose experts' weights are MXFP4 (`test_gpt_oss.py`)."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

_YARN = rope(
    "yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=16,
)  # fmt: skip
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ROWS = (
    ModelRow(
        "GptOssForCausalLM",
        "GptOssConfig",
        base={**SIZES, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9},
        quick=("as_published",),
        variants={
            "as_published": {"num_local_experts": 16, "num_experts_per_tok": 4, **_YARN, **_WINDOWS},
            "no_window": {"layer_types": ["full_attention"] * 3, **rope("default")},
            "all_windows": {"layer_types": ["sliding_attention"] * 3, **rope("default")},
            "low_limit": {"swiglu_limit": 0.7, "swiglu_alpha": 1.1, **rope("default")},
            "no_attention_bias": {"attention_bias": False, **_YARN},
            "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True, **rope("default")},
        },
        linears=ATTENTION,
        adapted={"num_hidden_layers": 3},
    ),
)
