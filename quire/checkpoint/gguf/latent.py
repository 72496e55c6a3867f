"""The families with multi-head latent attention, whose sizes GGUF files say in other words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.rope import scaling_of

_SIGMOID = 2  # of expert_gating_func
_CORRECTION = ".exp_probs_b.bias"  # which V3 alone has


def with_latents(file: GgufFile) -> Mapping[str, Any]:
    """DeepSeek-V2, or V3 and its like (Moonlight, GLM-4.7-Flash), whose experts are chosen by logistic functions; or
    Youtu's, which has no experts.

    Files of today keep keys and values as one head that all share, and say the heads' own sizes apart; older ones have
    the heads' own sizes alone.
    """
    more = {**_sizes(file), **_rotation(file)}
    guesses = file.get("nextn_predict_layers", 0) or 0
    more["num_hidden_layers"] = file.number("block_count") - guesses
    if not file.get("expert_count", 0):
        return {**more, "model_type": "youtu", "architectures": ["YoutuForCausalLM"]}
    more["first_k_dense_replace"] = file.dense_layers
    more["norm_topk_prob"] = bool(file.get("expert_weights_norm", False))
    grouped = (file.get("expert_group_count") or 1) > 1
    if file.get("expert_gating_func") == _SIGMOID or any(name.endswith(_CORRECTION) for name in file.tensors):
        named = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
        more.setdefault("n_group", file.get("expert_group_count", 1))
        more.setdefault("topk_group", file.get("expert_group_used_count", 1))
        return {**more, **named}
    return {**more, "topk_method": "group_limited_greedy" if grouped else "greedy"}


def minicpm3(file: GgufFile) -> Mapping[str, Any]:
    """Its multipliers, and the size of values' heads, are in no key: the published model's."""
    more = {**_sizes(file), **_rotation(file), "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    more["v_head_dim"] = file.rows("attn_kv_b.weight") // file.heads[0] - more["qk_nope_head_dim"]
    return more


def _sizes(file: GgufFile) -> dict[str, Any]:
    turned = file.number("rope.dimension_count")
    key = file.get("attention.key_length_mla") or file.number("attention.key_length")
    value = file.get("attention.value_length_mla") or file.get("attention.value_length", key - turned)
    return {
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "kv_lora_rank": file.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "num_key_value_heads": file.heads[0],
        "attention_bias": file.has("attn_kv_a_mqa.bias"),
    }


def _rotation(file: GgufFile) -> dict[str, Any]:
    """The part of a head that turns is a head of its own. What multiplies the scores, llama.cpp keeps a tenth of."""
    found: dict[str, Any] = {"rope_theta": file.get("rope.freq_base", 10000.0)}
    scaling = scaling_of(file)
    if scaling is not None and scaling["rope_type"] == "yarn":
        size = round(file.get("rope.scaling.yarn_log_multiplier", 0.0) * 10, 6)
        scaling.update({"mscale": size, "mscale_all_dim": size} if size else {})
    if scaling is not None:
        found["rope_scaling"] = scaling
    return found
