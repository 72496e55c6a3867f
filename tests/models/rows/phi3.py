"""Phi-3, 3.5 and 4: microsoft/Phi-3-mini-4k-instruct (window), -128k (longrope), Phi-4-mini (partial), phi-4."""

from typing import Any

from tests.models.rows.row import ModelRow


def longrope(original: int, **more: Any) -> dict[str, Any]:
    """Heads of 8 have four frequencies."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.5]}
    return {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **more},
        "original_max_position_embeddings": original,
    }


FOUR_OF_EIGHT = {"short_factor": [1.0, 1.2, 1.4], "long_factor": [1.0, 2.0, 4.0], "partial_rotary_factor": 0.75}

ROWS = (
    ModelRow(
        "Phi3ForCausalLM",
        "Phi3Config",
        quick=("window", "full"),
        linears=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        by_length=frozenset({"longrope", "longrope_never_long", "longrope_partial"}),
        variants={
            "window": {"sliding_window": 8, "num_key_value_heads": 4},
            "full": {"rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}},
            "longrope": {**longrope(24), "sliding_window": 200},
            "longrope_never_long": longrope(128),
            "longrope_partial": longrope(24, **FOUR_OF_EIGHT),
            "partial": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "tied": {"tie_word_embeddings": True},
        },
    ),
)
