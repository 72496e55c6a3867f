"""MiniCPM3: openbmb/MiniCPM3-4B; the numbers are its."""

from tests.models.rows.deepseek import LATENT, LATENT_LINEARS, ODD_SIZES, yarn
from tests.models.rows.row import ModelRow, rope

# Of four frequencies; MiniCPM3-4B has one set, for short and long.
_FACTORS = [1.0591234137867171, 4.937952647693647, 14.85530648787323, 16.940876586213285]
ROWS = (
    ModelRow(
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        base={**LATENT, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8, "rms_norm_eps": 1e-5},
        quick=("as_published",),
        gain=4.0,
        variants={
            "as_published": {
                "tie_word_embeddings": True,
                **rope("longrope", short_factor=_FACTORS, long_factor=_FACTORS, original_max_position_embeddings=128),
            },
            "two_sets": rope("longrope", short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=_FACTORS, factor=4.0,
                             original_max_position_embeddings=24),
            "one_query_projection": {"q_lora_rank": None},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "all_one": {"scale_emb": 1, "scale_depth": 1.0, "dim_model_base": 32},
            "yarn": yarn(1.0, 0.8),
            "odd_sizes": {**ODD_SIZES, "dim_model_base": 12},
        },
        by_length=frozenset({"two_sets"}),
        linears=(*LATENT_LINEARS, "gate_proj", "up_proj", "down_proj"),
        adapted={"tie_word_embeddings": False},
    ),
)  # fmt: skip
