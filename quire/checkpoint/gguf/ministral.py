"""Mistral 3 and Ministral 3 in GGUF files: what the latter say of queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.rope import base_of, scaling_of


def mistral3(file: GgufFile) -> Mapping[str, Any]:
    """By what rotations of "yarn" are multiplied follows from two numbers: one is in a key, the other is 1 to
    llama.cpp, as it is in what was published."""
    if not file.says("attention.temperature_scale"):
        return {}
    base = base_of(file)
    rope: dict[str, Any] = {"rope_type": "default", **(scaling_of(file, base, file.head_dim) or {}), "rope_theta": base}
    if rope["rope_type"] == "yarn":
        rope.update({"mscale": 1.0, "mscale_all_dim": file.real("rope.scaling.yarn_log_multiplier", 0.0)})
    rope["llama_4_scaling_beta"] = file.real("attention.temperature_scale")
    if rope["llama_4_scaling_beta"]:
        rope["original_max_position_embeddings"] = file.number("rope.scaling.original_context_length")
    else:
        rope.setdefault("original_max_position_embeddings", file.number("context_length"))
    return {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "rope_scaling": None,
        "rope_parameters": rope,
    }
