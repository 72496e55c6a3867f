"""Qwen2 and Qwen2.5."""

from tests.models.rows.llama import BASE, ROPE
from tests.models.rows.row import ModelRow

ROWS = (
    ModelRow(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        base=BASE,
        quick=("gqa", "rope_yarn"),
        by_length=frozenset({"rope_dynamic"}),
        token_by_token=frozenset({"gqa"}),
        variants={
            "gqa": {},
            "mqa": {"num_key_value_heads": 1},
            "mha": {"num_key_value_heads": 4},
            "tied": {"tie_word_embeddings": True},
            "eps": {"rms_norm_eps": 1e-2},
            "head_dim_apart": {"head_dim": 16},
            "fields_of_llama": {"attention_bias": False, "mlp_bias": True},  # without effect
            "windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "odd_sizes": {
                "hidden_size": 36,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "intermediate_size": 51,
                "vocab_size": 101,
            },
            **{name: ROPE[name] for name in ("rope_default", "rope_yarn", "rope_dynamic")},
        },
    ),
)
