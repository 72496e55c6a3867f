"""GraniteMoE: ibm-granite/granite-3.1-1b-a400m-instruct and granite-3.1-3b-a800m-instruct; the numbers are theirs."""

from tests.models.rows.mixtral import ATTENTION
from tests.models.rows.row import SIZES, ModelRow, rope

_NUMBERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "residual_multiplier": 0.22, "logits_scaling": 6.0,
}  # fmt: skip
ROWS = (
    ModelRow(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        base={**SIZES, **_NUMBERS, "num_local_experts": 8, "num_experts_per_tok": 3},
        quick=("as_published",),
        gain=4.0,
        variants={
            "as_published": {"num_local_experts": 32, "num_experts_per_tok": 8, "tie_word_embeddings": True},
            "untied": {},
            "attention_bias": {"attention_bias": True},
            "all_one": dict.fromkeys(_NUMBERS, 1.0),
            "mqa": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
            "rope": rope("default", rope_theta=1e7),
        },
        linears=ATTENTION,
        adapted={"tie_word_embeddings": False},
    ),
    ModelRow(
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        base={**SIZES, **_NUMBERS, "num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 40},
        quick=("shared",),
        gain=2.0,
        variants={
            "shared": {"num_local_experts": 32, "num_experts_per_tok": 8},
            "none_shared": {"shared_intermediate_size": 0},
            "tied": {"tie_word_embeddings": True, "attention_bias": True},
            "all_one": dict.fromkeys(_NUMBERS, 1.0),
            "mqa": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
            "rope": rope("default", rope_theta=1e7),
        },
        linears=ATTENTION,
    ),
)
