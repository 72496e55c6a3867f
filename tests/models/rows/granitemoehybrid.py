"""Granite 4: ibm-granite/granite-4.0-h-tiny, -h-small, -h-micro and -micro; the numbers are theirs."""

from tests.models.rows.row import LINEARS, SIZES, ModelRow, rope

A, M = "full_attention", "linear_attention"
STATE = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 12, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_chunk_size": 16,
}  # fmt: skip
NUMBERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 6.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 40}
ROWS = (
    ModelRow(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        base={
            **SIZES, **STATE, **NUMBERS, **EXPERTS, "num_hidden_layers": 4, "layer_types": [M, M, A, M],
            "position_embedding_type": "nope", "tie_word_embeddings": True,
        },
        quick=("h_tiny", "h_micro"),
        gain=4.0,
        linears=(*LINEARS[:4], "in_proj", "out_proj", "input_linear", "output_linear"),
        saved=("model.norm",),
        adapted={"tie_word_embeddings": False},
        variants={
            "h_tiny": {},
            "h_micro": {"num_local_experts": 0, "num_experts_per_tok": 0, "logits_scaling": 8.0},
            "micro": {
                "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": [A] * 4,
                "position_embedding_type": "rope", **rope("default", rope_theta=1e7),
            },
            "rotations": {"position_embedding_type": "rope", "layer_types": [A, M, M, A]},
            "biases": {"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            "groups": {"mamba_n_groups": 4, "mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_head": 16},
            "untied": {"tie_word_embeddings": False, "layer_types": [A, M, A, M], "num_key_value_heads": 1},
        },
    ),
)  # fmt: skip
