"""InternLM2: internlm/internlm2-chat-7b, internlm2_5-7b-chat and -1_8b."""

from tests.models.rows.oracles import internlm2
from tests.models.rows.row import SIZES, ModelRow

ROWS = (
    ModelRow(
        "InternLM2ForCausalLM",
        "",
        base={**SIZES, "bias": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None},
        quick=("as_published",),
        linears=("wqkv", "wo", "w1", "w3", "w2"),
        saved=("ffn_norm",),
        embedding="tok_embeddings",
        head="output",
        oracle=internlm2,
        variants={
            "as_published": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},  # past 128 tokens alone
            "no_scaling": {},
            "biases": {"bias": True},
            "mha": {"num_key_value_heads": 4},
            "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
            "rope_linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
        },
    ),
)
