"""MPT."""

from tests.models.rows.row import VOCAB, ModelRow

BASE = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}

ROWS = (
    ModelRow(
        "MptForCausalLM",
        "MptConfig",
        base=BASE,
        variants={
            "mpt_7b": {"attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None}},
            "six_heads": {"n_heads": 6, "d_model": 36},
            "clip_qkv": {"n_heads": 6, "d_model": 36, "attn_config": {"clip_qkv": 1.5}},
            "softmax_scale": {"attn_config": {"softmax_scale": 0.25}},
            "twelve_heads": {"n_heads": 12, "d_model": 48},
            "untied": {"tie_word_embeddings": False},
            "eps": {"layer_norm_epsilon": 1e-2},
        },
        quick=("mpt_7b", "clip_qkv"),
        linears=("Wqkv", "out_proj", "up_proj", "down_proj"),
        saved=("norm_f",),
        embedding="wte",
        aliases=("MPTForCausalLM",),
        adapted={"tie_word_embeddings": False},
    ),
)
