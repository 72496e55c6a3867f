"""GLM-4.5 and 4.6: zai-org/GLM-4.5, GLM-4.5-Air, GLM-4.6."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

_BASE = {**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
         **rope("default", rope_theta=1e6, partial_rotary_factor=0.5)}  # fmt: skip

ROWS = (
    ModelRow(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        base=_BASE,
        quick=("air",),
        variants={
            "air": {"n_routed_experts": 16, "num_experts_per_tok": 8, "attention_bias": True},
            "glm_4_5": {"n_routed_experts": 20, "num_experts_per_tok": 8, "attention_bias": True, "use_qk_norm": True,
                        "routed_scaling_factor": 2.5, "first_k_dense_replace": 2},
            "groups": {"n_group": 4, "topk_group": 2, "n_routed_experts": 12},
            "not_renormalised": {"norm_topk_prob": False, "first_k_dense_replace": 0},
            "two_shared_mqa": {"n_shared_experts": 2, "num_key_value_heads": 1},
            "tied_dense": {"tie_word_embeddings": True, "first_k_dense_replace": 3},
            "whole_heads": {"rms_norm_eps": 1e-2, **rope("default", partial_rotary_factor=1.0)},
        },
        linears=ATTENTION,
    ),
)  # fmt: skip
