"""Gemma 1, 2 and 3 (text): google/gemma-2b, gemma-2-2b, gemma-3-1b-it and their like; vaultgemma-1b."""

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
    ModelRow(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        base={**TIED, **CAPS, "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 24},
        quick=("as_published", "small_caps"),
        gain=1.5,
        variants={
            "as_published": {},
            "small_caps": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 20.0, "sliding_window": 5},
            "no_caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "other_layers": {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            "mqa": {"num_key_value_heads": 1, "query_pre_attn_scalar": 256},
            "untied": {"tie_word_embeddings": False, "attention_bias": True},
        },
        adapted={"tie_word_embeddings": False},
    ),
    ModelRow(
        "VaultGemmaForCausalLM",
        "VaultGemmaConfig",
        base={**TIED, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 16},
        quick=("as_published",),
        gain=1.5,
        variants={
            "as_published": {"num_key_value_heads": 4, "attn_logit_softcapping": None, "final_logit_softcapping": None},
            "caps": CAPS,
            "small_caps": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 20.0, "sliding_window": 5},
            "other_layers": {"layer_types": ["full_attention", *["sliding_attention"] * 2]},
            "mqa": {"num_key_value_heads": 1, "query_pre_attn_scalar": 256},
            "untied": {"tie_word_embeddings": False, "attention_bias": True},
        },
        adapted={"tie_word_embeddings": False},
    ),
    ModelRow(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        base={**TIED, "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
        quick=("as_published", "linear_rope"),
        gain=1.5,
        variants={
            "as_published": {"num_key_value_heads": 1},
            "linear_rope": {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "cap": {"final_logit_softcapping": CAPS["final_logit_softcapping"], "num_hidden_layers": 3},
            "no_window": {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3},
            "pattern_of_two": {"sliding_window_pattern": 2, "num_hidden_layers": 4, "sliding_window": 13},
            "untied": {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 3},
        },
        adapted={"tie_word_embeddings": False, "num_hidden_layers": 2, "sliding_window_pattern": 2},
    ),
)
