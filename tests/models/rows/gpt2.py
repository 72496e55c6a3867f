"""GPT-2."""

from tests.models.rows.row import VOCAB, ModelRow

BASE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


ROWS = (
    ModelRow(
        "GPT2LMHeadModel",
        "GPT2Config",
        base=BASE,
        quick=("gelu_new", "inverse_layer_idx"),
        token_by_token=frozenset({"gelu_new"}),
        upcasts=frozenset({"reorder_and_upcast"}),
        gain=4.0,  # learned positions need more to be outweighed
        linears=("c_attn", "c_proj", "c_fc"),
        saved=("ln_f",),
        embedding="wte",
        adapted={"tie_word_embeddings": False},
        variants={
            "gelu_new": {},
            "relu": {"activation_function": "relu"},
            "gelu_fast": {"activation_function": "gelu_fast"},
            "leaky_relu": {"activation_function": "leaky_relu"},
            "n_inner": {"n_inner": 52},
            "unscaled": {"scale_attn_weights": False},
            "inverse_layer_idx": {"scale_attn_by_inverse_layer_idx": True},
            "reorder_and_upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
            "untied": {"tie_word_embeddings": False},
            "eps": {"layer_norm_epsilon": 1e-2},
            "one_head": {"n_head": 1},
        },
    ),
)
