"""HunYuan's dense models: tencent/Hunyuan-7B-Instruct and its like."""

from tests.models.rows.row import SIZES, ModelRow, rope

ALPHA = rope("dynamic", alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0)
ROWS = (
    ModelRow(
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        base={**SIZES, "head_dim": 16},
        quick=("as_published",),
        saved=("key_layernorm",),
        variants={
            "as_published": ALPHA,
            "default_rope": {},
            "tied": {"tie_word_embeddings": True, **ALPHA},
            "biases": {"attention_bias": True},
            "mha": {"num_key_value_heads": 4, "head_dim": 8},
            "epsilon": {"rms_norm_eps": 1e-2, "num_key_value_heads": 1},
        },
    ),
)
