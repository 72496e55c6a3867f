"""dots.llm1: rednote-hilab/dots.llm1.inst."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "Dots1ForCausalLM",
        "Dots1Config",
        base={**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
              "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": None},
        quick=("as_published",),
        variants={
            "as_published": {"n_routed_experts": 16, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5,
                             "norm_topk_prob": True, "num_key_value_heads": 4, **rope("default", rope_theta=1e7)},
            "groups": {"n_group": 4, "topk_group": 2, "n_routed_experts": 12},
            "windows": {"sliding_window": 9, "max_window_layers": 1},
            "not_renormalised": {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 1},
            "attention_bias_mqa": {"attention_bias": True, "num_key_value_heads": 1},
            "tied_dense": {"tie_word_embeddings": True, "first_k_dense_replace": 3, "rms_norm_eps": 1e-2},
        },
        linears=ATTENTION,
    ),
)  # fmt: skip
