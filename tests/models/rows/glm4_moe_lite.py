"""GLM-4.7-Flash: zai-org/GLM-4.7-Flash."""

from tests.models.rows.deepseek import LATENT, LATENT_LINEARS, ODD_SIZES
from tests.models.rows.row import ModelRow, rope

ROWS = (
    ModelRow(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        base={**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
              "n_shared_experts": 1},
        quick=("as_published",),
        variants={
            "as_published": {"n_routed_experts": 16, "num_experts_per_tok": 4, **rope("default", rope_theta=1e6)},
            "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.0},
            "dense_in_between": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "halves_tied": {"rope_interleave": False, "tie_word_embeddings": True},
            "not_renormalised": {"norm_topk_prob": False, "attention_bias": True},
            "odd_sizes": {**ODD_SIZES, "q_lora_rank": 11},
        },
        linears=LATENT_LINEARS,
    ),
)  # fmt: skip
