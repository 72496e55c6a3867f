"""GPT-NeoX and Pythia."""

from tests.models.rows.row import SIZES, ModelRow, rope

SHAPE = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}

ROWS = (
    ModelRow(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        base=SHAPE,
        variants={
            "pythia": {"rotary_pct": 0.25, "hidden_size": 64, "layer_norm_eps": 1e-5},
            "sequential": {"use_parallel_residual": False},
            "no_bias": {"attention_bias": False},
            "whole_heads": {"rotary_pct": 1.0, "rotary_emb_base": 500},
            "gelu_fast": {"hidden_act": "gelu_fast"},
            "tied": {"tie_word_embeddings": True},
            "one_head": {"num_attention_heads": 1, "layer_norm_eps": 1e-2},
            "linear": rope("linear", factor=2.0, partial_rotary_factor=0.5),
        },
        quick=("pythia", "sequential"),
        linears=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        saved=("final_layer_norm",),
        embedding="embed_in",
    ),
)
