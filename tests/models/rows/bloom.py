"""BLOOM."""

from tests.models.rows.row import VOCAB, ModelRow

BASE = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "seq_length": 128}

ROWS = (
    ModelRow(
        "BloomForCausalLM",
        "BloomConfig",
        base=BASE,
        variants={
            "bloom": {"offset_alibi": 100, "masked_softmax_fusion": True, "attention_softmax_in_fp32": True},
            "norms_as_residual": {"apply_residual_connection_post_layernorm": True},
            "six_heads": {"n_head": 6, "hidden_size": 36},
            "twelve_heads": {"n_head": 12, "hidden_size": 48},
            "one_head": {"n_head": 1},
            "untied": {"tie_word_embeddings": False},
            "eps": {"layer_norm_epsilon": 1e-2},
        },
        quick=("bloom", "six_heads"),
        linears=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        saved=("ln_f", "word_embeddings_layernorm"),
        embedding="word_embeddings",
        adapted={"tie_word_embeddings": False},
    ),
)
