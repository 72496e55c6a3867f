"""Ernie 4.5's mixtures of experts: baidu/ERNIE-4.5-21B-A3B-PT and ERNIE-4.5-300B-A47B-PT."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        base={**SIZES, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
              "moe_layer_start_index": 1},
        quick=("as_published",),
        variants={
            "as_published": {"moe_num_experts": 16, "moe_k": 6, "tie_word_embeddings": True,
                             **rope("default", rope_theta=5e5)},
            "no_shared_experts": {"moe_num_shared_experts": 0},
            "every_second_layer": {"moe_layer_interval": 2, "moe_layer_start_index": 0},
            "to_the_second": {"moe_layer_end_index": 1, "moe_layer_start_index": 0},
            "biases": {"use_bias": True},
            "mqa_norm_min": {"num_key_value_heads": 1, "moe_norm_min": 0.9},
        },
        linears=ATTENTION,
        adapted={"tie_word_embeddings": False},
    ),
)  # fmt: skip
