"""MiniMax-M2: MiniMaxAI/MiniMax-M2."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        base={**SIZES, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
        quick=("as_published",),
        variants={
            "as_published": {"num_local_experts": 16, "num_experts_per_tok": 8, "rope_theta": 5e6},
            "few": {"num_experts_per_tok": 1},
            "whole_heads": {"rotary_dim": 16},
            "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
            "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
            "quarter": {"rotary_dim": None, "hidden_act": "gelu", **rope("linear", factor=2.0,
                                                                         partial_rotary_factor=0.25)},
        },
        linears=ATTENTION,
    ),
)  # fmt: skip
