"""OPT and Galactica."""

from tests.models.rows.row import VOCAB, ModelRow

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
}

ROWS = (
    ModelRow(
        "OPTForCausalLM",
        "OPTConfig",
        base=BASE,
        quick=("pre_norm", "projected_post_norm"),
        token_by_token=frozenset({"pre_norm"}),
        gain=4.0,  # learned positions need more to be outweighed
        linears=("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
        saved=("final_layer_norm",),
        adapted={"tie_word_embeddings": False},
        variants={
            "pre_norm": {},
            "post_norm": {"do_layer_norm_before": False},
            "projected": {"word_embed_proj_dim": 24},
            "projected_post_norm": {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
            "no_bias": {"enable_bias": False},
            "no_affine": {"layer_norm_elementwise_affine": False},
            "no_final_norm": {"_remove_final_layer_norm": True},
            "gelu": {"activation_function": "gelu"},
            "relu6": {"activation_function": "relu6"},
            "untied": {"tie_word_embeddings": False},
            "one_head": {"num_attention_heads": 1},
        },
    ),
)
