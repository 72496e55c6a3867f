"""FlexOlmo: allenai/FlexOlmo-7x7B-1T."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "FlexOlmoForCausalLM",
        "FlexOlmoConfig",
        base={**SIZES, "num_experts": 7, "num_experts_per_tok": 3},
        gain=4.0,
        quick=("as_published",),
        variants={
            "as_published": {"num_key_value_heads": 4, "num_experts_per_tok": 5, **rope("default", rope_theta=5e5)},
            "gqa": {},
            "renormalised": {"norm_topk_prob": True},
            "attention_bias": {"attention_bias": True},
            "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
            "eps": {"rms_norm_eps": 1e-2, "hidden_act": "gelu_pytorch_tanh"},
        },
        linears=ATTENTION,
    ),
)
