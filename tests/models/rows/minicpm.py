"""MiniCPM: openbmb/MiniCPM-2B-sft-bf16 and -1B; the numbers are theirs."""

from tests.models.rows.oracles import minicpm
from tests.models.rows.row import SIZES, ModelRow

NUMBERS = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8}
ROWS = (
    ModelRow(
        "MiniCPMForCausalLM",
        "",
        base={**SIZES, **NUMBERS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None},
        quick=("as_published",),
        gain=4.0,
        variants={
            "as_published": {"num_key_value_heads": 4, "tie_word_embeddings": True},
            "gqa": {},
            "all_one": {"scale_emb": 1, "scale_depth": 1.0, "dim_model_base": 32},
            "biases": {"attention_bias": True},
            "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
            "rope_linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
        },
        adapted={"tie_word_embeddings": False},
        oracle=minicpm,
    ),
)
