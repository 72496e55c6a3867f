"""Gemma 1, 2 and 3 (text): google/gemma-2b, gemma-2-2b, gemma-3-1b-it and their like."""

from tests.models.rows.row import SIZES, ModelRow, rope

TIED = {**SIZES, "head_dim": 16, "tie_word_embeddings": True, "hidden_size": 40}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

ROWS = (
    ModelRow(
        "GemmaForCausalLM",
        "GemmaConfig",
        base=TIED,
        quick=("mqa",),
        gain=1.5,
        variants={
            "mqa": {"num_key_value_heads": 1, "hidden_act": "gelu"},  # as published: it means the tanh form
            "mha": {"num_key_value_heads": 4},
            "untied": {"tie_word_embeddings": False},
            "attention_bias": {"attention_bias": True},
            "epsilon": {"rms_norm_eps": 1e-2},
            "rope": rope("linear", factor=2.0),
        },
        adapted={"tie_word_embeddings": False},
    ),
)
