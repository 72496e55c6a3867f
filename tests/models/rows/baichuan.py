"""Baichuan and Baichuan 2, whose classes are code of the checkpoints'."""

from tests.models.rows.oracles import baichuan
from tests.models.rows.row import VOCAB, ModelRow

AUTO_MAP = {
    "AutoConfig": "configuration_baichuan.BaichuanConfig",
    "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
}
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "model_max_length": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "auto_map": AUTO_MAP, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEVEN = {"max_position_embeddings": 128}

ROWS = (
    ModelRow(
        "BaichuanForCausalLM",
        "LlamaConfig",
        base=BASE,
        variants={
            "baichuan_7b": SEVEN,
            "baichuan_13b": {},
            "baichuan2_7b": {**SEVEN, "z_loss_weight": 0},
            "baichuan2_13b": {"z_loss_weight": 0, "num_attention_heads": 8},
            "six_heads": {"num_attention_heads": 6, "hidden_size": 36},
            "twelve_heads": {"num_attention_heads": 12, "hidden_size": 48},
            "gelu": {**SEVEN, "hidden_act": "gelu"},
            "eps": {**SEVEN, "rms_norm_eps": 1e-2},
        },
        quick=("baichuan_7b", "baichuan_13b"),
        linears=("W_pack", "o_proj", "gate_proj", "up_proj", "down_proj"),
        aliases=("BaiChuanForCausalLM",),
        oracle=baichuan,
    ),
)
