"""Youtu-LLM: tencent/Youtu-LLM-2B."""

from tests.models.rows.deepseek import LATENT, LATENT_LINEARS, ODD_SIZES, yarn
from tests.models.rows.row import ModelRow, rope

ROWS = (
    ModelRow(
        "YoutuForCausalLM",
        "YoutuConfig",
        base=LATENT,
        quick=("as_published",),
        variants={
            "as_published": {"tie_word_embeddings": True, **rope("default", rope_theta=1.6e6)},
            "one_query_projection": {"q_lora_rank": None},
            "halves": {"rope_interleave": False},
            "biases": {"attention_bias": True},
            "yarn": yarn(1.0, 0.8),
            "odd_sizes": ODD_SIZES,
        },
        linears=(*LATENT_LINEARS, "gate_proj", "up_proj", "down_proj"),
        adapted={"tie_word_embeddings": False},
    ),
)
