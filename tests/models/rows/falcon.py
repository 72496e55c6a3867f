"""Falcon in its layouts."""

from tests.models.rows.row import SIZES, ModelRow, rope

BASE = {name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}

ROWS = (
    ModelRow(
        "FalconForCausalLM",
        "FalconConfig",
        base=BASE,
        variants={
            "falcon_7b": {"multi_query": True, "parallel_attn": True, "bias": False, "tie_word_embeddings": True},
            "falcon_40b": {**GROUPS, "bias": False},
            "falcon2_11b": {**GROUPS, "num_ln_in_parallel_attn": 1},
            "sequential": {"parallel_attn": False, "bias": True},
            "multi_head": {"multi_query": False, "bias": True},
            "multi_head_sequential": {"multi_query": False, "parallel_attn": False},
            "ffn": {"ffn_hidden_size": 48, "activation": "relu"},
            "falcon_rw": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
            "alibi_of_32_heads": {"alibi": True, "multi_query": False, "num_attention_heads": 32, "hidden_size": 64},
            "alibi_of_6_heads": {"alibi": True, "multi_query": False, "num_attention_heads": 6, "hidden_size": 36},
            "linear": rope("linear", factor=2.0),
        },
        quick=("falcon_7b", "falcon_40b", "falcon_rw"),
        linears=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        saved=("ln_f",),
        embedding="word_embeddings",
        # As transformers runs it for a user. Its eager attention adds ALiBi twice: once itself, once by the mask.
        attention="sdpa",
        adapted={"tie_word_embeddings": False},
    ),
)
