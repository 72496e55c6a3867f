"""GPT-J and CodeGen."""

from tests.models.rows.row import VOCAB, ModelRow

BASE = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 4,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS = {
    "published": {"rotary_dim": 4, "n_embd": 64},
    "whole_heads": {"rotary_dim": 8},
    "n_inner": {"n_inner": 52},
    "relu": {"activation_function": "relu"},
    "eps": {"layer_norm_epsilon": 1e-2},
    "tied": {"tie_word_embeddings": True},
    "eight_heads": {"n_head": 8},
}

ROWS = (
    ModelRow(
        "GPTJForCausalLM",
        "GPTJConfig",
        base=BASE,
        variants=VARIANTS,
        quick=("eight_heads", "published"),
        linears=("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"),
        saved=("ln_f",),
        embedding="wte",
    ),
    ModelRow(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        base=BASE,
        variants=VARIANTS,
        quick=("eight_heads", "published"),
        linears=("qkv_proj", "out_proj", "fc_in", "fc_out"),
        saved=("ln_f",),
        embedding="wte",
    ),
)
