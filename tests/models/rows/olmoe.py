"""OLMoE: allenai/OLMoE-1B-7B-0924 and its Instruct version."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow

ROWS = (
    ModelRow(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        base={**SIZES, "num_experts": 8, "num_experts_per_tok": 3},
        quick=("as_published", "clip"),
        variants={
            "as_published": {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 8},
            "gqa": {},
            "clip": {"clip_qkv": 0.7},
            "renormalised": {"norm_topk_prob": True},
            "attention_bias": {"attention_bias": True},
            "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
            "eps": {"rms_norm_eps": 1e-2, "hidden_act": "gelu_pytorch_tanh"},
        },
        linears=ATTENTION,
    ),
)
