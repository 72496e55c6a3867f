"""Llama 4: meta-llama/Llama-4-Scout-17B-16E-Instruct and Llama-4-Maverick-17B-128E-Instruct, the text models."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

ROWS = (
    ModelRow(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        base={**SIZES, "head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4,
              "attention_chunk_size": 16, "floor_scale": 16, "no_rope_layer_interval": 2, "num_hidden_layers": 4},
        quick=("scout", "maverick"),
        gain=2.5,
        variants={
            "scout": {"num_local_experts": 16, **rope("llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
                                                      original_max_position_embeddings=32)},
            "maverick": {"num_local_experts": 8, "use_qk_norm": False, "interleave_moe_layer_step": 2},
            "small_chunks": {"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.5, "num_key_value_heads": 1},
            "chunk_of_one": {"attention_chunk_size": 1, "attn_temperature_tuning": False, "moe_layers": [1, 3]},
            "large_chunks": {"attention_chunk_size": 64, "tie_word_embeddings": True, "attention_bias": True},
            "chunks_without_rotation": {"no_rope_layers": [0, 1, 0, 1],
                                        "layer_types": ["chunked_attention", "chunked_attention"] * 2},
            "rotation_without_chunks": {"no_rope_layers": [1, 1, 0, 1], "rms_norm_eps": 1e-2,
                                        "layer_types": ["full_attention"] * 3 + ["chunked_attention"]},
            "dense": {"moe_layers": [], "hidden_act": "gelu"},
        },
        linears=ATTENTION,
        not_linear=("router",),
        aliases=("Llama4ForConditionalGeneration",),
    ),
)  # fmt: skip
