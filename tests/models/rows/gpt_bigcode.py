"""SantaCoder and StarCoder."""

from tests.models.rows.row import VOCAB, ModelRow

BASE = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip

ROWS = (
    ModelRow(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        base=BASE,
        variants={
            "starcoder": {"n_inner": 128, "activation_function": "gelu"},
            "multi_head": {"multi_query": False},
            "santacoder": {"activation_function": "gelu_fast", "n_inner": None},
            "unscaled": {"scale_attn_weights": False},
            "n_inner": {"n_inner": 52},
            "untied": {"tie_word_embeddings": False},
            "eps": {"layer_norm_epsilon": 1e-2},
        },
        quick=("starcoder", "multi_head"),
        gain=4.0,
        linears=("c_attn", "c_proj", "c_fc"),
        saved=("ln_f",),
        embedding="wte",
        adapted={"tie_word_embeddings": False},
    ),
)
