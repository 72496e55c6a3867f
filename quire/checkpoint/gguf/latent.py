"""The families with multi-head latent attention, whose sizes GGUF files say in other words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.rope import base_of, scaling_of
from quire.errors import CheckpointError, UnsupportedModelError

_SOFTMAX, _LOGISTIC = 1, 2  # of expert_gating_func
_CORRECTION = ".exp_probs_b.bias"  # which V3 alone has


def with_latents(file: GgufFile) -> Mapping[str, Any]:
    """DeepSeek-V2, or V3 and its like (Moonlight, GLM-4.7-Flash), whose experts are chosen by logistic functions; or
    Youtu's, which has no experts.

    Files of today keep keys and values as one head that all share, and say the heads' own sizes apart; older ones have
    the heads' own sizes alone.
    """
    more = {**_sizes(file), **_rotation(file)}
    if not file.number("expert_count", 0, least=0):
        return {**more, "model_type": "youtu", "architectures": ["YoutuForCausalLM"]}
    more["first_k_dense_replace"] = file.dense_layers
    more["norm_topk_prob"] = file.flag("expert_weights_norm", False)
    more["routed_scaling_factor"] = file.real("expert_weights_scale", 1.0) or 1.0
    groups = file.number("expert_group_count", 1, least=0) or 1
    more.update(n_group=groups, topk_group=file.number("expert_group_used_count", 1, least=0) or 1)
    if _is_logistic(file):
        return {**more, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return {**more, "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _is_logistic(file: GgufFile) -> bool:
    """Files of V2 that are older than the key do not have it, and V3 alone has corrections."""
    corrected = any(name.endswith(_CORRECTION) for name in file.tensors)
    found = file.number("expert_gating_func", 0, least=0)
    if found not in (0, _SOFTMAX, _LOGISTIC) or (found == _SOFTMAX and corrected):
        raise UnsupportedModelError(
            f"{file.name}: expert_gating_func is {found}; served are {_SOFTMAX}, softmax without corrections, and "
            f"{_LOGISTIC}, logistic functions."
        )
    return found == _LOGISTIC or corrected


def minicpm3(file: GgufFile) -> Mapping[str, Any]:
    """Its multipliers, and the size of values' heads, are in no key: the published model's."""
    more = {**_sizes(file), **_rotation(file), "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    size = file.rows("attn_kv_b.weight") // file.heads[0] - more["qk_nope_head_dim"]
    if file.says("attention.value_length") and more["v_head_dim"] != size:
        raise CheckpointError(
            f"{file.name}: {file.architecture}.attention.value_length is {more['v_head_dim']}, and by the shape of "
            f"blk.0.attn_kv_b.weight it is {size}."
        )
    return {**more, "v_head_dim": size}


def _sizes(file: GgufFile) -> dict[str, Any]:
    turned = file.number("rope.dimension_count")
    rank = file.number("attention.kv_lora_rank")
    apart = file.number("attention.key_length_mla", 0, least=0)
    key, value = file.number("attention.key_length"), file.number("attention.value_length", rank)
    if apart:
        if (key, value) != (rank + turned, rank):
            raise CheckpointError(
                f"{file.name}: {file.architecture}.attention.key_length and value_length are {key} and {value}, and of "
                f"a latent of {rank} they are {rank + turned} and {rank}."
            )
        key, value = apart, file.number("attention.value_length_mla")
    elif not file.says("attention.value_length"):
        value = key - turned
    if key <= turned:
        raise CheckpointError(
            f"{file.name}: {file.architecture}.rope.dimension_count is {turned}, and heads of keys have {key}."
        )
    return {
        "q_lora_rank": file.number("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "num_key_value_heads": file.heads[0],
        "attention_bias": file.has("attn_kv_a_mqa.bias"),
    }


def _rotation(file: GgufFile) -> dict[str, Any]:
    """The part of a head that turns is a head of its own. What multiplies the scores, llama.cpp keeps a tenth of."""
    found: dict[str, Any] = {"rope_theta": base_of(file)}
    scaling = scaling_of(file, found["rope_theta"], file.number("rope.dimension_count"))
    if scaling is not None and scaling["rope_type"] == "yarn":
        size = round(file.real("rope.scaling.yarn_log_multiplier", 0.0) * 10, 6)
        scaling.update({"mscale": size, "mscale_all_dim": size} if size else {})
    if scaling is not None:
        found["rope_scaling"] = scaling
    return found
