"""Starcoder2: bigcode/starcoder2-3b, -7b and -15b."""

from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        base={**SIZES, "sliding_window": 8, "norm_epsilon": 1e-5, "use_bias": True},
        quick=("as_published", "full"),
        gain=4.0,
        linears=("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
        variants={
            "as_published": {"tie_word_embeddings": True, **rope("default", rope_theta=999999.4420358813)},
            "full": {"sliding_window": None},
            "untied": {"sliding_window": 16},
            "no_bias": {"use_bias": False},
            "epsilon": {"norm_epsilon": 1e-2, "num_key_value_heads": 1},
            "gelu": {"hidden_act": "gelu", "num_key_value_heads": 4},
        },
        adapted={"tie_word_embeddings": False},
    ),
)
