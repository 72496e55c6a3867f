"""Falcon-H1: tiiuae/Falcon-H1-0.5B-Instruct and its like; the multipliers are theirs."""

from tests.models.rows.row import LINEARS, SIZES, ModelRow, rope

SMALL = {
    "head_dim": 8, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 12, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
}  # fmt: skip
NUMBERS = {
    "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "key_multiplier": 0.390625,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}  # fmt: skip
NORM = {"mamba_rms_norm": True, "mamba_n_heads": 8, "mamba_d_head": 6, "mamba_n_groups": 2}
ROWS = (
    ModelRow(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        base={**SIZES, **SMALL, **NUMBERS, **rope("default", rope_theta=1e11)},
        quick=("as_published", "norm"),
        gain=4.0,
        saved=("final_layernorm",),
        linears=(*LINEARS, "in_proj"),
        not_linear=("out_proj",),  # PEFT does not train it in this family
        variants={
            "as_published": {},
            "norm": NORM,
            "norm_before_gate": {**NORM, "mamba_norm_before_gate": True},
            "biases": {
                "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
                "attention_in_multiplier": 0.75, "mamba_conv_bias": False,
            },
            "one_group_a_head": {"mamba_n_groups": 6, "mamba_d_state": 17, "mamba_d_conv": 2},
            "steps_have_limits": {"time_step_limit": [0.01, 0.7], "tie_word_embeddings": True},
            "wide_heads": {"mamba_n_heads": 2, "mamba_d_head": 40, "mamba_d_ssm": 80, "head_dim": 16},
        },
    ),
)  # fmt: skip
