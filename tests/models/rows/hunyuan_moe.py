"""HunYuan's mixtures of experts: tencent/Hunyuan-A13B-Instruct."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow

ROWS = (
    ModelRow(
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        base={**SIZES, "num_experts": 8, "moe_topk": 3, "head_dim": 16},
        quick=("as_published",),
        variants={
            "as_published": {"num_experts": 16, "moe_topk": [8, 8, 8], "tie_word_embeddings": True,
                             "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0,
                                                 "factor": 1.0}},
            "by_layer": {"moe_topk": [1, 3, 2]},
            "one_expert": {"num_experts": 1, "moe_topk": 1},
            "attention_bias": {"attention_bias": True, "num_key_value_heads": 4},
            "mqa": {"num_key_value_heads": 1, "head_dim": 8},
            "eps": {"rms_norm_eps": 1e-2, "hidden_act": "gelu"},
        },
        linears=ATTENTION,
        adapted={"tie_word_embeddings": False},
        not_linear=("wg",),
    ),
)  # fmt: skip
